#include "c10d/remainders.h"

#include <utility>

#include <ATen/core/grad_mode.h>

namespace fccl::hooks {
namespace {

at::Tensor zeros_like_gradient(const at::Tensor& parameter) {
  const auto options = at::device(parameter.device()).dtype(at::kFloat);
  if (!parameter.is_non_overlapping_and_dense()) return at::zeros(parameter.sizes(), options);
  return at::empty_strided(parameter.sizes(), parameter.strides(), options).zero_();
}

bool lies_like_gradient(const at::Tensor& remainder, const at::Tensor& parameter) {
  if (remainder.device() != parameter.device()) return false;
  return parameter.is_non_overlapping_and_dense() ? remainder.strides() == parameter.strides()
                                                  : remainder.is_contiguous();
}

}  // namespace

at::Tensor Remainders::of(const at::Tensor& parameter) {
  const std::lock_guard lock(mutex_);
  const auto key = parameter.getIntrusivePtr();
  const auto found = entries_.find(key.get());
  if (found != entries_.end() && !found->second.parameter.expired()) {
    at::Tensor& remainder = found->second.remainder;
    if (!lies_like_gradient(remainder, parameter))  // the parameter was moved, or laid out anew
      remainder = zeros_like_gradient(parameter).copy_(remainder);
    return remainder;
  }
  std::erase_if(entries_, [](const auto& item) { return item.second.parameter.expired(); });
  Entry entry{c10::weak_intrusive_ptr<c10::TensorImpl>(key), zeros_like_gradient(parameter)};
  return entries_.insert_or_assign(key.get(), std::move(entry)).first->second.remainder;
}

std::optional<at::Tensor> Remainders::get(const at::Tensor& parameter) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(parameter.unsafeGetTensorImpl());
  if (found == entries_.end() || found->second.parameter.expired()) return std::nullopt;
  return found->second.remainder.clone();
}

void Remainders::set(const at::Tensor& parameter, const at::Tensor& remainder) {
  const at::NoGradGuard no_grad;
  of(parameter).copy_(remainder);
}

void Remainders::clear() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
}

}  // namespace fccl::hooks
