// Error feedback's state: what a lossy hook has not said yet of each parameter's gradient.
//
// Keyed by the parameter itself, not by its place in a bucket, since DDP cuts buckets anew. A remainder has
// the parameter's shape, its order in memory and float32 for its type. It dies with the parameter.
#pragma once

#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>

namespace fccl::hooks {

class Remainders {
 public:
  // The remainder of `parameter`, zeros at first. It lies in memory as DDP lays the gradient in a bucket:
  // as the parameter does if that has no gaps, else row by row.
  at::Tensor of(const at::Tensor& parameter);

  // A copy, or nothing if the parameter has none yet.
  std::optional<at::Tensor> get(const at::Tensor& parameter) const;
  // Takes copies of these, instead of all there are: of all of them, or of none if one cannot be had.
  // `values`: one per parameter, of its sizes; any dtype, device and strides.
  void replace(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& values);

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> parameter;  // an address alone could be another tensor's by now
    at::Tensor remainder;
  };

  using Entries = std::unordered_map<const c10::TensorImpl*, Entry>;
  static Entry entry_of(const at::Tensor& parameter);

  mutable std::mutex mutex_;
  Entries entries_;
};

}  // namespace fccl::hooks
