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
  CollectiveKernel kernel;
  DType dtype;
  KernelEntry entry;
};

template <template <class, class> class Kernel, class... Elements>
void append(std::vector<Row>& rows, CollectiveKernel kernel, Types<Elements...>) {
  (rows.push_back({kernel, Elements::kDType, entry_of<Kernel<Elements, NoFaults>>()}), ...);
}

const std::vector<Row>& table() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all;
    append<OneShotAllReduce>(all, CollectiveKernel::kOneShotAllReduce, Reduced{});
    append<TwoShotAllReduce>(all, CollectiveKernel::kTwoShotAllReduce, Reduced{});
    append<OneShotAllGather>(all, CollectiveKernel::kOneShotAllGather, Moved{});
    append<Broadcast>(all, CollectiveKernel::kBroadcast, Moved{});
    return all;
  }();
  return rows;
}

bool has_nan(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kFloat16 ||
         dtype == DType::kBFloat16;
}

}  // namespace

KernelEntry find_kernel(CollectiveKernel kernel, DType dtype) {
  const bool moves = kernel == CollectiveKernel::kOneShotAllGather || kernel == CollectiveKernel::kBroadcast;
  if (moves && !has_nan(dtype)) dtype = DType::kInt32;
  for (const Row& row : table()) {
    if (row.kernel == kernel && row.dtype == dtype) return row.entry;
  }
  return {};
}

std::size_t collective_kernel_count() { return table().size(); }

}  // namespace fccl::cuda
