// Stable counting sort of rows by expert: O(rows + experts), against O(rows log rows) for a comparison sort.
// Plain C ABI on int64 arrays, loaded with ctypes by deepspeed_autoep/moe/native.py.

#include <cstdint>
#include <vector>

extern "C" {

// experts[rows] in [0, num_experts) -> order[rows], inverse[rows], counts[num_experts].
// order[i] is the row at sorted position i; inverse[order[i]] == i.
// Returns -1, or the first row whose expert is out of range (outputs are then unspecified).
std::int64_t autoep_sort_by_expert(const std::int64_t* experts, std::int64_t rows, std::int64_t num_experts,
                                   std::int64_t* order, std::int64_t* inverse, std::int64_t* counts) {
  for (std::int64_t e = 0; e < num_experts; ++e) counts[e] = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t e = experts[row];
    if (e < 0 || e >= num_experts) return row;
    ++counts[e];
  }
  std::vector<std::int64_t> next(static_cast<std::size_t>(num_experts));
  std::int64_t start = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    next[static_cast<std::size_t>(e)] = start;
    start += counts[e];
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t position = next[static_cast<std::size_t>(experts[row])]++;
    order[position] = row;
    inverse[row] = position;
  }
  return -1;
}

}  // extern "C"
