// Sum of squares and number of zeros of a run of gradient elements, in the widest form that the build has.
#pragma once

#include <cstdint>

#include "element_types.h"

namespace {  // every build of the library keeps its own

// Elements of one call at the most: narrow lanes count zeros.
constexpr std::int64_t kBlock = 1 << 16;

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
// Of a lane's sum in a run; outside of them squares may have vanished or overflowed in fp32.
constexpr float kSmallestSum = 1e-28f, kLargestSum = 1e37f;
// Bytes that loads are announced ahead: the processor's own guess stops at the end of a 4 KiB page.
constexpr std::int64_t kAhead = 2048;

__m256d low_half(__m256 x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
__m256d high_half(__m256 x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }

// Sums of the lanes of vectors that are stored to memory.
template <class Lane, class Vector>
auto total_of(Vector vector) {
  Lane lanes[sizeof(Vector) / sizeof(Lane)];
  std::memcpy(lanes, &vector, sizeof vector);
  decltype(Lane{} + std::int64_t{}) total = 0;
  for (const Lane lane : lanes) total += lane;
  return total;
}

void announce(const void* p) { _mm_prefetch(static_cast<const char*>(p) + kAhead, _MM_HINT_T0); }

#ifdef __AVX512BW__
// Sums of runs. Squares are added up in fp32, 16 elements in each of 64 lanes, before fp64 takes over: a relative error of
// 1e-6 at the very most.
constexpr std::int64_t kRun = 1024;

class RunSums {
 public:
  // False where squares leave fp32's range: nothing but zeros was counted then.
  template <class T>
  bool add(const T* in) {
    __m512 parts[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (std::int64_t i = 0; i < kRun; i += 64) take64(in + i, parts);
    const __m512 run = _mm512_add_ps(_mm512_add_ps(parts[0], parts[1]), _mm512_add_ps(parts[2], parts[3]));
    const __mmask16 large = _mm512_cmp_ps_mask(run, _mm512_set1_ps(kSmallestSum), _CMP_GE_OQ);
    if (_mm512_mask_cmp_ps_mask(large, run, _mm512_set1_ps(kLargestSum), _CMP_LE_OQ) != 0xFFFF) return false;
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(run));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(run, 1));
    total_ = _mm512_add_pd(total_, _mm512_add_pd(low, high));
    return true;
  }
  double squares() const { return total_of<double>(total_); }
  std::int64_t zeros() const { return total_of<std::int32_t>(zeros_) + total_of<std::int16_t>(narrow_zeros_); }

 private:
  template <class T>
  void take64(const T* p, __m512* parts) {
    for (int part = 0; part < 4; ++part) {
      announce(p + 16 * part);
      const __m512 x = wide(p + 16 * part);
      parts[part] = _mm512_fmadd_ps(x, x, parts[part]);
      const __mmask16 zero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ);
      zeros_ = _mm512_mask_sub_epi32(zeros_, zero, zeros_, _mm512_set1_epi32(-1));
    }
  }
  // bf16 is the upper half of fp32: of each pair one element is shifted up, of the other the lower half is cut off.
  void take64(const Bf16* p, __m512* parts) {
    for (int part = 0; part < 2; ++part) {
      announce(p + 32 * part);
      const __m512i pairs = _mm512_loadu_si512(p + 32 * part);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
      parts[2 * part] = _mm512_fmadd_ps(even, even, parts[2 * part]);
      parts[2 * part + 1] = _mm512_fmadd_ps(odd, odd, parts[2 * part + 1]);
      const __mmask32 zero = _mm512_testn_epi16_mask(pairs, _mm512_set1_epi16(0x7FFF));  // of either sign
      narrow_zeros_ = _mm512_mask_sub_epi16(narrow_zeros_, zero, narrow_zeros_, _mm512_set1_epi16(-1));
    }
  }
  static __m512 wide(const float* p) { return _mm512_loadu_ps(p); }
  static __m512 wide(const Fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

  __m512d total_ = _mm512_setzero_pd();
  __m512i zeros_ = _mm512_setzero_si512(), narrow_zeros_ = _mm512_setzero_si512();  // lanes of 32, of 16 bits
};
#else
// As above in half as many lanes.
constexpr std::int64_t kRun = 512;

class RunSums {
 public:
  template <class T>
  bool add(const T* in) {
    __m256 parts[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (std::int64_t i = 0; i < kRun; i += 32) take32(in + i, parts);
    const __m256 run = _mm256_add_ps(_mm256_add_ps(parts[0], parts[1]), _mm256_add_ps(parts[2], parts[3]));
    const __m256 in_range = _mm256_and_ps(_mm256_cmp_ps(run, _mm256_set1_ps(kSmallestSum), _CMP_GE_OQ),
                                          _mm256_cmp_ps(run, _mm256_set1_ps(kLargestSum), _CMP_LE_OQ));
    if (_mm256_movemask_ps(in_range) != 0xFF) return false;
    total_ = _mm256_add_pd(total_, _mm256_add_pd(low_half(run), high_half(run)));
    return true;
  }
  double squares() const { return total_of<double>(total_); }
  std::int64_t zeros() const { return -total_of<std::int32_t>(minus_zeros_) - total_of<std::int16_t>(minus_narrow_zeros_); }

 private:
  template <class T>
  void take32(const T* p, __m256* parts) {
    announce(p);
    if (sizeof(T) == 4) announce(p + 16);
    for (int part = 0; part < 4; ++part) {
      const __m256 x = load(p + 8 * part);
      parts[part] = _mm256_fmadd_ps(x, x, parts[part]);
      const __m256 zero = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_EQ_OQ);
      minus_zeros_ = _mm256_add_epi32(minus_zeros_, _mm256_castps_si256(zero));
    }
  }
  void take32(const Bf16* p, __m256* parts) {
    announce(p);
    for (int part = 0; part < 2; ++part) {
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16 * part));
      const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
      const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
      parts[2 * part] = _mm256_fmadd_ps(even, even, parts[2 * part]);
      parts[2 * part + 1] = _mm256_fmadd_ps(odd, odd, parts[2 * part + 1]);
      // Added to itself an element loses its sign: a zero of either sign is 0.
      const __m256i zero = _mm256_cmpeq_epi16(_mm256_add_epi16(pairs, pairs), _mm256_setzero_si256());
      minus_narrow_zeros_ = _mm256_add_epi16(minus_narrow_zeros_, zero);
    }
  }

  __m256d total_ = _mm256_setzero_pd();
  __m256i minus_zeros_ = _mm256_setzero_si256(), minus_narrow_zeros_ = _mm256_setzero_si256();  // lanes of 32, of 16 bits
};
#endif
static_assert(kBlock / 16 <= INT16_MAX, "a lane that counts zeros would overflow");

template <class T>
double squares_in_fp64(const T* in) {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  for (std::int64_t i = 0; i < kRun; i += 8) {
    const __m256 x = load(in + i);
    low = _mm256_fmadd_pd(low_half(x), low_half(x), low);
    high = _mm256_fmadd_pd(high_half(x), high_half(x), high);
  }
  return total_of<double>(_mm256_add_pd(low, high));
}
#endif

// At most kBlock elements.
template <class T>
Sums sums_of(const T* in, std::int64_t count) {
  std::int64_t i = 0;
  Sums sums;
#ifdef __AVX2__
  RunSums runs;
  for (; i + kRun <= count; i += kRun)
    if (!runs.add(in + i)) sums.squares += squares_in_fp64(in + i);
  sums.squares += runs.squares();
  sums.zeros = runs.zeros();
#endif
  const Sums rest = sums_one_by_one(in + i, count - i);
  return {sums.squares + rest.squares, sums.zeros + rest.zeros};
}

}  // namespace
