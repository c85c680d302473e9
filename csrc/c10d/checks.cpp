// Arguments are checked before anything else happens. A refused call still has its place in the
// group's order: the peers, who made theirs, are told and raise instead of waiting.
#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include "c10d/backend.h"

namespace fccl::c10d_backend {

void FcclBackend::refuse(const Call& call, Fault fault, const std::string& why) {
  if (carrier_->mode() != Carrier::Mode::kLocal) {
    try {
      auto work =
          c10::make_intrusive<CollectiveWork>(rank_, call.type, call.title, Tensors{}, Tensors{}, executor_);
      // Not waited for: it may wait for earlier calls.
      executor_->run_later(work, [carrier = carrier_, why, timeout = call.timeout] {
        carrier->reject(why, Deadline::after(timeout));
      });
    } catch (const c10::Error&) {
      // The group is gone, so nobody waits.
    }
  }
  throw_refusal(call, fault, why);
}

void FcclBackend::throw_refusal(const Call& call, Fault fault, const std::string& why) const {
  const char* name = call.title + sizeof("fccl:") - 1;
  const std::string message = std::string("fccl ") + name + " on rank " + std::to_string(rank_) + ": " + why;
  switch (fault) {
    case Fault::kType: C10_THROW_ERROR(TypeError, message);
    case Fault::kUnsupported: C10_THROW_ERROR(NotImplementedError, message);
    case Fault::kValue: break;
  }
  C10_THROW_ERROR(ValueError, message);
}

const at::Tensor& FcclBackend::only(const Call& call, const Tensors& tensors, const char* what) {
  if (tensors.size() != 1) {
    refuse(call, Fault::kValue,
           std::to_string(tensors.size()) + " " + what + " tensors, expected exactly one");
  }
  return tensors[0];
}

void FcclBackend::check_dense(const Call& call, const at::Tensor& tensor, const char* what) {
  if (tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu() &&
      !tensor.is_quantized()) {
    return;
  }
  if (!tensor.defined()) refuse(call, Fault::kValue, std::string("the ") + what + " tensor is undefined");
  if (tensor.is_quantized()) {
    refuse(call, Fault::kType,
           std::string("the ") + what + " tensor is quantised (" + describe(tensor) +
               "), expected a plain dtype");
  }
  refuse(call, Fault::kValue,
         std::string("the ") + what + " tensor is " + describe(tensor) +
             ", expected a dense (strided) CPU tensor");
}

void FcclBackend::check_written(const Call& call, const at::Tensor& tensor, const char* what) {
  if (tensor.is_contiguous()) return;
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refuse(call, Fault::kValue,
           std::string("several elements of the ") + what + " tensor " + describe(tensor) +
               " share one place in memory (it was expanded), expected a tensor that can be written; clone() "
               "it");
  }
}

void FcclBackend::check_same_type(const Call& call, const at::Tensor& tensor, const at::Tensor& expected,
                                  const char* what) {
  if (tensor.scalar_type() == expected.scalar_type()) return;
  refuse(call, Fault::kType,
         std::string("the ") + what + " tensor is " + describe(tensor) + ", expected dtype " +
             type_name(expected.scalar_type()) + " like the other tensors of the call");
}

void FcclBackend::check_numel(const Call& call, const at::Tensor& tensor, std::int64_t expected,
                              const char* what) {
  if (tensor.numel() == expected) return;
  refuse(call, Fault::kValue,
         std::string("the ") + what + " tensor is " + describe(tensor) + " with " +
             std::to_string(tensor.numel()) + " elements, expected " + std::to_string(expected));
}

void FcclBackend::check_length(const Call& call, std::size_t length, std::size_t expected, const char* what) {
  if (length == expected) return;
  refuse(call, Fault::kValue, std::to_string(length) + " " + what + ", expected " + std::to_string(expected));
}

void FcclBackend::check_root(const Call& call, std::int64_t root) {
  if (root >= 0 && root < size_) return;
  refuse(call, Fault::kValue,
         "the root is rank " + std::to_string(root) + ", expected 0 to " + std::to_string(size_ - 1));
}

Reduction FcclBackend::check_reduction(const Call& call, const at::Tensor& tensor,
                                       const ::c10d::ReduceOp& op) {
  Reduction reduction;
  const std::string why = plan_reduction(tensor.scalar_type(), op, reduction);
  if (!why.empty()) refuse(call, Fault::kType, why);
  return reduction;
}

}  // namespace fccl::c10d_backend
