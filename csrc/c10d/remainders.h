// Error feedback's state: what a lossy hook has not said yet of each parameter's gradient.
//
// Keyed by the parameter itself, not by its place in a bucket, since DDP cuts buckets anew. A remainder has
// the parameter's shape, its order in memory and float32 for its type. It dies with the parameter.
#pragma once

#include <mutex>
#include <optional>
#include <unordered_map>

#include <ATen/ATen.h>

namespace fccl::hooks {

class Remainders {
 public:
  // The remainder of `parameter`, zeros at first. It lies in memory as DDP lays the gradient in a bucket:
  // as the parameter does if that has no gaps, else row by row.
  at::Tensor of(const at::Tensor& parameter);

  // A copy, or nothing if the parameter has none yet.
  std::optional<at::Tensor> get(const at::Tensor& parameter) const;
  // Any dtype and strides; of the parameter's sizes.
  void set(const at::Tensor& parameter, const at::Tensor& remainder);
  void clear();

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> parameter;  // an address alone could be another tensor's by now
    at::Tensor remainder;
  };

  mutable std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
};

}  // namespace fccl::hooks
