// Passes over many gradient segments at once, for CPU: pack, scale and write back, sums of squares and zeros, checksums.
// Plain C ABI, loaded with ctypes by deepspeed_autoep/ops/cpu.py, which says what each function means. setup.py builds
// this file three times, portable, for AVX2 and for AVX-512, and the loader takes what the processor has: one wheel runs
// anywhere. What is written back is fp32 arithmetic with rounding to nearest even, as torch's: all builds agree bit for bit.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "element_types.h"
#include "sums.h"

namespace {

template <class In, class Out>
void scale(const In* in, Out* out, std::int64_t count, float factor) {
  std::int64_t i = 0;
#ifdef __AVX2__
  const __m256 factors = _mm256_set1_ps(factor);
  for (; i + 8 <= count; i += 8) store(out + i, _mm256_mul_ps(load(in + i), factors));
#endif
  for (; i < count; ++i) from_float(to_float(in[i]) * factor, out + i);
}

// Work is handed out in blocks of kBlock elements; each block's sum is its own, so that results do not depend on the
// number of threads. Below this a thread costs more than it gives.
constexpr std::int64_t kElementsPerThread = 1 << 19;

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
