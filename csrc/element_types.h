// Gradient elements: their dtypes, and conversion to and from fp32 with rounding to nearest even, as torch's.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {  // every build of the library keeps its own

enum Type : std::int32_t { kFloat = 0, kBf16 = 1, kFp16 = 2 };
struct Bf16 { std::uint16_t bits; };
struct Fp16 { std::uint16_t bits; };

float of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
std::uint32_t to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float to_float(float x) { return x; }
float to_float(Bf16 x) { return of_bits(std::uint32_t{x.bits} << 16); }
float to_float(Fp16 x) {
  const std::uint32_t sign = std::uint32_t{x.bits & 0x8000u} << 16, exponent = x.bits >> 10 & 31u, rest = x.bits & 0x3FFu;
  if (exponent == 31) return of_bits(sign | 0x7F800000u | rest << 13);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(rest) * 0x1p-24f;  // zero, subnormal: exact
  return of_bits(sign | (exponent + 112) << 23 | rest << 13);
}

void from_float(float x, float* out) { *out = x; }
void from_float(float x, Bf16* out) {
  const std::uint32_t bits = to_bits(x);
  out->bits = static_cast<std::uint16_t>(x != x ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
void from_float(float x, Fp16* out) {
  const std::uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
  std::uint32_t half;
  if (size > 0x7F800000u) {
    half = 0x7E00u;  // NaN
  } else if (size >= 0x477FF000u) {
    half = 0x7C00u;  // rounds to infinity
  } else if (size < 0x38800000u) {
    // Subnormal: adding 0.5 puts fp16's last place at fp32's, and the addition rounds.
    half = to_bits(of_bits(size) + 0.5f) - 0x3F000000u;
  } else {
    half = (size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13;
  }
  out->bits = static_cast<std::uint16_t>(sign | half);
}

#ifdef __AVX2__
// Eight consecutive elements as fp32, and back.
__m256 load(const float* p) { return _mm256_loadu_ps(p); }
__m256 load(const Bf16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
__m256 load(const Fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
void store(float* p, __m256 x) { _mm256_storeu_ps(p, x); }
void store(Bf16* p, __m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i wide = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
  // packus works within 128-bit halves; the permutation joins their low quarters.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
void store(Fp16* p, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#endif

}  // namespace
