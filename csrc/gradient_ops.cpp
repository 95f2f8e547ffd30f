// Passes over many gradient segments at once, for CPU: pack, scale and write back, sums of squares and zeros, checksums.
// Plain C ABI, loaded with ctypes by deepspeed_autoep/ops/cpu.py, which says what each function means. setup.py builds
// this file twice, portable and with AVX2, and the loader takes what the processor has: one wheel runs anywhere.
// Arithmetic is fp32 with rounding to nearest even, as torch's, so that both builds and torch agree bit for bit.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

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

template <class In, class Out>
void scale(const In* in, Out* out, std::int64_t count, float factor) {
  std::int64_t i = 0;
#ifdef __AVX2__
  const __m256 factors = _mm256_set1_ps(factor);
  for (; i + 8 <= count; i += 8) store(out + i, _mm256_mul_ps(load(in + i), factors));
#endif
  for (; i < count; ++i) from_float(to_float(in[i]) * factor, out + i);
}

// Work is handed out in blocks of this many elements; each block's sum is its own, so that results do not depend on the
// number of threads.
constexpr std::int64_t kBlock = 1 << 16;
// Below this a thread costs more than it gives.
constexpr std::int64_t kElementsPerThread = 1 << 19;

struct Sums {
  double squares = 0.0;
  std::int64_t zeros = 0;
};

template <class T>
Sums sums_one_by_one(const T* in, std::int64_t count) {
  Sums sums;
  for (std::int64_t i = 0; i < count; ++i) {
    const double x = to_float(in[i]);
    sums.squares += x * x;
    sums.zeros += x == 0.0;
  }
  return sums;
}

#ifdef __AVX2__
// Elements whose squares are added up in fp32, 16 in each of 32 lanes, before fp64 takes over: a relative error of 1e-6 at
// the very most. Where squares leave fp32's range the run is done again in fp64.
constexpr std::int64_t kRun = 512;
// Of a lane's sum in a run; outside of them squares may have vanished or overflowed.
constexpr float kSmallestSum = 1e-28f, kLargestSum = 1e37f;

double sum_of(__m256d x) {
  alignas(32) double lanes[4];
  _mm256_store_pd(lanes, x);
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}
__m256d low_half(__m256 x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
__m256d high_half(__m256 x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }

// Adds the squares of 32 elements to four accumulators and minus one for each zero to `zeros`, lanes of 32 or 16 bits.
template <class T>
void take32(const T* p, __m256* sums, __m256i& zeros) {
  for (int part = 0; part < 4; ++part) {
    const __m256 x = load(p + 8 * part);
    sums[part] = _mm256_fmadd_ps(x, x, sums[part]);
    zeros = _mm256_add_epi32(zeros, _mm256_castps_si256(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_EQ_OQ)));
  }
}
// bf16 is the upper half of fp32: of each pair one element is shifted up, of the other the lower half is cut off.
void take32(const Bf16* p, __m256* sums, __m256i& zeros) {
  for (int part = 0; part < 2; ++part) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16 * part));
    const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
    sums[2 * part] = _mm256_fmadd_ps(even, even, sums[2 * part]);
    sums[2 * part + 1] = _mm256_fmadd_ps(odd, odd, sums[2 * part + 1]);
    // Added to itself an element loses its sign: a zero of either sign is 0.
    zeros = _mm256_add_epi16(zeros, _mm256_cmpeq_epi16(_mm256_add_epi16(pairs, pairs), _mm256_setzero_si256()));
  }
}

template <class Lane>
std::int64_t minus_lanes(__m256i lanes) {
  alignas(32) Lane values[32 / sizeof(Lane)];
  _mm256_store_si256(reinterpret_cast<__m256i*>(values), lanes);
  std::int64_t total = 0;
  for (const Lane value : values) total -= value;
  return total;
}
template <class T>
std::int64_t count_of(__m256i zeros, const T*) { return minus_lanes<std::int32_t>(zeros); }
std::int64_t count_of(__m256i zeros, const Bf16*) { return minus_lanes<std::int16_t>(zeros); }

template <class T>
double squares_in_fp64(const T* in) {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  for (std::int64_t i = 0; i < kRun; i += 8) {
    const __m256 x = load(in + i);
    low = _mm256_fmadd_pd(low_half(x), low_half(x), low);
    high = _mm256_fmadd_pd(high_half(x), high_half(x), high);
  }
  return sum_of(_mm256_add_pd(low, high));
}
#endif

// At most kBlock elements: 16 lanes of 16 bits count their zeros, to kBlock / 16 each.
static_assert(kBlock / 16 <= INT16_MAX, "a lane would overflow");
template <class T>
Sums sums_of(const T* in, std::int64_t count) {
  std::int64_t i = 0;
  double squares = 0.0;
  std::int64_t zeros = 0;
#ifdef __AVX2__
  __m256i zero_lanes = _mm256_setzero_si256();
  __m256d total = _mm256_setzero_pd();
  for (; i + kRun <= count; i += kRun) {
    __m256 parts[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (std::int64_t j = i; j < i + kRun; j += 32) take32(in + j, parts, zero_lanes);
    const __m256 run = _mm256_add_ps(_mm256_add_ps(parts[0], parts[1]), _mm256_add_ps(parts[2], parts[3]));
    const __m256 in_range = _mm256_and_ps(_mm256_cmp_ps(run, _mm256_set1_ps(kSmallestSum), _CMP_GE_OQ),
                                          _mm256_cmp_ps(run, _mm256_set1_ps(kLargestSum), _CMP_LE_OQ));
    if (_mm256_movemask_ps(in_range) == 0xFF) {
      total = _mm256_add_pd(total, _mm256_add_pd(low_half(run), high_half(run)));
    } else {
      squares += squares_in_fp64(in + i);
    }
  }
  squares += sum_of(total);
  zeros = count_of(zero_lanes, in);
#endif
  Sums rest = sums_one_by_one(in + i, count - i);
  return {squares + rest.squares, zeros + rest.zeros};
}

// Bits times an odd number made of the position, modulo 2^64.
template <class Bits>
std::uint64_t checksum_of(const Bits* in, std::int64_t start, std::int64_t count) {
  std::uint64_t total = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t position = static_cast<std::uint32_t>(start + i);
    total += std::uint64_t{in[i]} * std::uint64_t{position * 0x9E3779B9u | 1u};
  }
  return total;
}

template <class In>
void scale_to(const In* in, void* out, std::int32_t type, std::int64_t start, std::int64_t count, float factor) {
  if (type == kFloat) scale(in + start, static_cast<float*>(out) + start, count, factor);
  if (type == kBf16) scale(in + start, static_cast<Bf16*>(out) + start, count, factor);
  if (type == kFp16) scale(in + start, static_cast<Fp16*>(out) + start, count, factor);
}

struct Block {
  std::int64_t segment, start, count;
};

std::vector<Block> blocks_of(std::int64_t segments, const std::int64_t* count) {
  std::vector<Block> blocks;
  for (std::int64_t s = 0; s < segments; ++s)
    for (std::int64_t start = 0; start < count[s]; start += kBlock)
      blocks.push_back({s, start, std::min(kBlock, count[s] - start)});
  return blocks;
}

template <class Work>
void for_each_block(const std::vector<Block>& blocks, std::int32_t threads, const Work& work) {
  std::int64_t elements = 0;
  for (const Block& block : blocks) elements += block.count;
  const std::int64_t useful = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, elements / kElementsPerThread));
  const auto share = [&](std::int64_t index) {
    const std::int64_t total = static_cast<std::int64_t>(blocks.size());
    for (std::int64_t b = total * index / useful; b < total * (index + 1) / useful; ++b) work(b, blocks[b]);
  };
  std::vector<std::thread> helpers;
  for (std::int64_t index = 1; index < useful; ++index) helpers.emplace_back(share, index);
  share(0);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

extern "C" {

// For each segment s with offset[s] >= 0: buffer[offset[s] + i] = data[s][i] as fp32.
void autoep_pack(std::int64_t segments, const void* const* data, const std::int32_t* type, const std::int64_t* count,
                 const std::int64_t* offset, float* buffer, std::int32_t threads) {
  for_each_block(blocks_of(segments, count), threads, [&](std::int64_t, const Block& block) {
    const std::int64_t s = block.segment;
    if (offset[s] < 0) return;
    float* out = buffer + offset[s] + block.start;
    if (type[s] == kFloat) std::memcpy(out, static_cast<const float*>(data[s]) + block.start, block.count * sizeof(float));
    if (type[s] == kBf16) scale(static_cast<const Bf16*>(data[s]) + block.start, out, block.count, 1.0f);
    if (type[s] == kFp16) scale(static_cast<const Fp16*>(data[s]) + block.start, out, block.count, 1.0f);
  });
}

// For each segment s: data[s][i] = source * factor[s], where source is buffer[offset[s] + i], or data[s][i] itself when
// offset[s] < 0. Arrays have `segments` entries; type is a Type.
void autoep_scale_unpack(std::int64_t segments, void* const* data, const std::int32_t* type, const std::int64_t* count,
                         const std::int64_t* offset, const float* factor, const float* buffer, std::int32_t threads) {
  for_each_block(blocks_of(segments, count), threads, [&](std::int64_t, const Block& block) {
    const std::int64_t s = block.segment;
    if (offset[s] >= 0) {
      scale_to(buffer + offset[s], data[s], type[s], block.start, block.count, factor[s]);
    } else if (type[s] == kFloat) {
      scale_to(static_cast<const float*>(data[s]), data[s], type[s], block.start, block.count, factor[s]);
    } else if (type[s] == kBf16) {
      scale_to(static_cast<const Bf16*>(data[s]), data[s], type[s], block.start, block.count, factor[s]);
    } else {
      scale_to(static_cast<const Fp16*>(data[s]), data[s], type[s], block.start, block.count, factor[s]);
    }
  });
}

// For each segment s: squares[s] = sum of data[s][i]^2 to 1e-6 of its value or better (finite exactly when every element
// is), zeros[s] = number of elements equal to zero.
void autoep_squares_and_zeros(std::int64_t segments, const void* const* data, const std::int32_t* type,
                              const std::int64_t* count, double* squares, double* zeros, std::int32_t threads) {
  const std::vector<Block> blocks = blocks_of(segments, count);
  std::vector<Sums> sums(blocks.size());
  for_each_block(blocks, threads, [&](std::int64_t b, const Block& block) {
    const void* in = data[block.segment];
    if (type[block.segment] == kFloat) sums[b] = sums_of(static_cast<const float*>(in) + block.start, block.count);
    if (type[block.segment] == kBf16) sums[b] = sums_of(static_cast<const Bf16*>(in) + block.start, block.count);
    if (type[block.segment] == kFp16) sums[b] = sums_of(static_cast<const Fp16*>(in) + block.start, block.count);
  });
  std::fill(squares, squares + segments, 0.0);
  std::fill(zeros, zeros + segments, 0.0);
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    squares[blocks[b].segment] += sums[b].squares;
    zeros[blocks[b].segment] += static_cast<double>(sums[b].zeros);
  }
}

// For each segment s: result[s] = sum of bits(data[s][i]) * (uint32(i * 0x9E3779B9) | 1), modulo 2^64.
void autoep_checksums(std::int64_t segments, const void* const* data, const std::int32_t* type, const std::int64_t* count,
                      std::uint64_t* result, std::int32_t threads) {
  const std::vector<Block> blocks = blocks_of(segments, count);
  std::vector<std::uint64_t> sums(blocks.size());
  for_each_block(blocks, threads, [&](std::int64_t b, const Block& block) {
    const void* in = data[block.segment];
    sums[b] = type[block.segment] == kFloat
                  ? checksum_of(static_cast<const std::uint32_t*>(in) + block.start, block.start, block.count)
                  : checksum_of(static_cast<const std::uint16_t*>(in) + block.start, block.start, block.count);
  });
  std::fill(result, result + segments, std::uint64_t{0});
  for (std::size_t b = 0; b < blocks.size(); ++b) result[blocks[b].segment] += sums[b];
}

}  // extern "C"
