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

Remainders::Entry Remainders::entry_of(const at::Tensor& parameter) {
  return {c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr()),
          zeros_like_gradient(parameter)};
}

at::Tensor Remainders::of(const at::Tensor& parameter) {
  const std::lock_guard lock(mutex_);
  const auto* key = parameter.unsafeGetTensorImpl();
  const auto found = entries_.find(key);
  if (found != entries_.end() && !found->second.parameter.expired()) {
    at::Tensor& remainder = found->second.remainder;
    if (!lies_like_gradient(remainder, parameter))  // the parameter was moved, or laid out anew
      remainder = zeros_like_gradient(parameter).copy_(remainder);
    return remainder;
  }
  std::erase_if(entries_, [](const auto& item) { return item.second.parameter.expired(); });
  return entries_.insert_or_assign(key, entry_of(parameter)).first->second.remainder;
}

std::optional<at::Tensor> Remainders::get(const at::Tensor& parameter) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(parameter.unsafeGetTensorImpl());
  if (found == entries_.end() || found->second.parameter.expired()) return std::nullopt;
  return found->second.remainder.clone();
}

void Remainders::replace(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& values) {
  TORCH_CHECK(parameters.size() == values.size(), parameters.size(), " parameters and ", values.size(),
              " remainders");
  const at::NoGradGuard no_grad;
  Entries entries;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Entry entry = entry_of(parameters[i]);
    entry.remainder.copy_(values[i]);
    entries.insert_or_assign(parameters[i].unsafeGetTensorImpl(), std::move(entry));
  }
  const std::lock_guard lock(mutex_);
  entries_.swap(entries);
}

}  // namespace fccl::hooks
