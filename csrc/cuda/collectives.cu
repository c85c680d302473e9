// The communicating kernels that are built.
#include <vector>

#include "cuda/all_reduce.h"
#include "cuda/gather_broadcast.h"
#include "cuda/kernel_entry.cuh"

namespace fccl::cuda {
namespace {

using Reduced = Types<Float32, Float64, Float16, BFloat16, Int32, Int64>;
// What only moves bytes needs the type for a failure's sake: a NaN of the right width, or none (Int32 stands
// for all types without one).
using Moved = Types<Float32, Float64, Float16, BFloat16, Int32>;

struct Row {
  Algorithm algorithm;
  DType element;
  KernelEntry entry;
};

template <template <class, class> class Kernel, class... Elements>
void append(std::vector<Row>& rows, Algorithm algorithm, Types<Elements...>) {
  (rows.push_back({algorithm, Elements::kDType, entry_of<Kernel<Elements, NoFaults>>()}), ...);
}

const std::vector<Row>& table() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all;
    append<OneShotAllReduce>(all, Algorithm::kOneShotAllReduce, Reduced{});
    append<TwoShotAllReduce>(all, Algorithm::kTwoShotAllReduce, Reduced{});
    append<OneShotAllGather>(all, Algorithm::kOneShotAllGather, Moved{});
    append<Broadcast>(all, Algorithm::kBroadcast, Moved{});
    return all;
  }();
  return rows;
}

}  // namespace

KernelEntry find_kernel(Algorithm algorithm, DType element) {
  for (const Row& row : table()) {
    if (row.algorithm == algorithm && row.element == element) return row.entry;
  }
  return {};
}

std::vector<const void*> collective_entries() {
  std::vector<const void*> entries;
  for (const Row& row : table()) entries.push_back(row.entry.entry);
  return entries;
}

std::size_t collective_kernel_count() { return table().size(); }

}  // namespace fccl::cuda
