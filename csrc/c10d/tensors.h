// What the engine may be handed of torch's tensors: dtypes, reduce ops, plain memory.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "common/dtype.h"

namespace fccl::c10d_backend {

DType dtype_of(at::ScalarType type) noexcept;
// As users write it: "float32".
std::string type_name(at::ScalarType type);

// What a reduction works on: complex numbers are pairs of real ones for sums and averages.
struct Reduction {
  DType dtype = DType::kBytes;
  std::size_t per_element = 1;  // numbers of `dtype` in one element of the tensor
  ReduceOp op = ReduceOp::kSum;
  at::Tensor factor;  // PREMUL_SUM: multiply by this (or by `scale`) before summing
  double scale = 1.0;
  bool premultiply = false;
};

// Empty and `out` filled in if `op` can be done on `type`; else why not ("…, expected …").
std::string plan_reduction(at::ScalarType type, const ::c10d::ReduceOp& op, Reduction& out);

// A dense CPU tensor whose elements lie in memory in order, as they are.
bool is_plain(const at::Tensor& tensor);
// "float32[2, 3]" and what else distinguishes it.
std::string describe(const at::Tensor& tensor);

// Keeps autograd, version counters and inference mode out of copies made on the user's behalf: a
// collective may write into an inference tensor from a thread that is not in inference mode.
using PlainDispatch = at::AutoDispatchBelowADInplaceOrView;

// `tensor` itself if plain, else a plain copy.
at::Tensor readable(const at::Tensor& tensor);
// `tensor` itself if plain, else plain memory of the same shape with undefined contents.
at::Tensor writable(const at::Tensor& tensor);
// Puts the result where the user wanted it, if writable() or readable() made a copy.
void put_back(const at::Tensor& result, const at::Tensor& tensor);
// Plain memory of `count` elements like those of `like`.
at::Tensor scratch(std::int64_t count, const at::Tensor& like);
// A copy multiplied as a PREMUL_SUM asks.
at::Tensor premultiplied(const at::Tensor& tensor, const Reduction& reduction);

// The bytes of a plain tensor as a tensor, which keeps the first one.
at::Tensor bytes_of(const at::Tensor& plain);

inline std::size_t byte_count(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
}
// Whether the memory of two plain tensors has a byte in common.
bool overlaps(const at::Tensor& a, const at::Tensor& b);

}  // namespace fccl::c10d_backend
