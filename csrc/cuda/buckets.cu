// The bucket kernels that are built: formats of one byte for all block sizes and types of gradients, those of
// two bytes for what their hooks use.
#include <vector>

#include "cuda/bucket_kernels.h"
#include "cuda/kernel_entry.cuh"

namespace fccl::cuda {
namespace {

struct Row {
  BucketKernel kernel;
  DType gradients;  // kBytes: whatever they are
  codec::BlockFormat code;
  std::uint32_t block;
  KernelEntry entry;
};

template <class Code, int kBlock, class... Sources>
void append(std::vector<Row>& rows, Types<Sources...>) {
  constexpr codec::BlockFormat kFormat = Code::kFormat;
  (rows.push_back({BucketKernel::kEncode, Sources::kDType, kFormat, kBlock,
                   entry_of<EncodeBucket<Sources, Code, kBlock>>()}),
   ...);
  (rows.push_back({BucketKernel::kDecode, Sources::kDType, kFormat, kBlock,
                   entry_of<DecodeBucket<Sources, Code, kBlock>>()}),
   ...);
  rows.push_back(
      {BucketKernel::kReduce, DType::kBytes, kFormat, kBlock, entry_of<ReduceShard<Code, kBlock>>()});
}

template <class... Codes>
void append_bytes(std::vector<Row>& rows, Types<Codes...>) {
  using Sources = Types<FloatSource, Float16Source, BFloat16Source>;
  (append<Codes, 128>(rows, Sources{}), ...);
  (append<Codes, 256>(rows, Sources{}), ...);
  (append<Codes, 512>(rows, Sources{}), ...);
  (append<Codes, 1024>(rows, Sources{}), ...);
}

const std::vector<Row>& table() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all;
    append_bytes(all, Types<codec::Int8Code, codec::Float8E4M3Code, codec::Float8E5M2Code>{});
    append<codec::Float16Code, 256>(all, Types<FloatSource>{});
    append<codec::BFloat16Code, 256>(all, Types<FloatSource>{});
    return all;
  }();
  return rows;
}

}  // namespace

KernelEntry find_kernel(BucketKernel kernel, DType gradients, codec::BlockFormat code, std::uint32_t block) {
  for (const Row& row : table()) {
    if (row.kernel == kernel && (row.gradients == gradients || row.gradients == DType::kBytes) &&
        row.code == code && row.block == block) {
      return row.entry;
    }
  }
  return {};
}

std::size_t bucket_kernel_count() { return table().size(); }

}  // namespace fccl::cuda
