// The packing kernels that are built: within each type, and between float32 and the 16-bit floats.
#include <vector>

#include "cuda/kernel_entry.cuh"
#include "cuda/pack.h"

namespace fccl::cuda {
namespace {

struct Row {
  PackKernel kernel;
  DType from;
  DType to;
  KernelEntry entry;
};

template <class From, class... To>
void append(std::vector<Row>& rows, Types<To...>) {
  (rows.push_back({PackKernel::kPack, From::kDType, To::kDType, entry_of<PackTensors<From, To>>()}), ...);
  (rows.push_back({PackKernel::kUnpack, From::kDType, To::kDType, entry_of<UnpackTensors<From, To>>()}), ...);
}

const std::vector<Row>& table() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all;
    append<FloatSource>(all, Types<FloatSource, Float16Source, BFloat16Source>{});
    append<Float16Source>(all, Types<FloatSource, Float16Source>{});
    append<BFloat16Source>(all, Types<FloatSource, BFloat16Source>{});
    return all;
  }();
  return rows;
}

}  // namespace

KernelEntry find_kernel(PackKernel kernel, DType from, DType to) {
  for (const Row& row : table()) {
    if (row.kernel == kernel && row.from == from && row.to == to) return row.entry;
  }
  return {};
}

std::size_t pack_kernel_count() { return table().size(); }

}  // namespace fccl::cuda
