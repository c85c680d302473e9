// fccl._C.direct_*: collectives beneath torch's wrapper. For people: python/fccl/direct.py.
//
// Each returns false, having done nothing, where the call must go through torch.distributed.
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "c10d/backend.h"

namespace fccl::bindings {
namespace {

using c10d_backend::FcclBackend;

using ProcessGroupPtr = c10::intrusive_ptr<::c10d::ProcessGroup>;

struct Target {
  ProcessGroupPtr group;
  c10::intrusive_ptr<FcclBackend> backend;  // null: not to be called directly
};

// The ranks of a group may come to different answers: a call is the same one on either way.
Target target_of(const py::handle& group) {
  if (!py::isinstance<::c10d::ProcessGroup>(group) || c10::impl::dispatch_mode_enabled()) return {};
  auto pg = group.cast<ProcessGroupPtr>();
  // torch throws where the group has no backend for the device, and says so better when it is asked.
  const auto& types = pg->getDeviceTypes();
  if (std::none_of(types.begin(), types.end(), [](const auto& device) { return device.is_cpu(); })) return {};
  auto backend = c10::dynamic_intrusive_pointer_cast<FcclBackend>(pg->getBackend(c10::DeviceType::CPU));
  return {std::move(pg), std::move(backend)};
}

// The backend refuses what is wrong with a CPU tensor as it does behind torch's wrapper. Complex ones torch
// hands to backends as twice as many real ones, which the peers' calls must fit.
bool is_ordinary(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && !tensor.is_complex() && !at::isTensorSubclassLike(tensor);
}

#ifdef C10D_BACKEND_HAS_HOOKS  // torch 2.14: what users registered to run around every collective
using Name = ::c10d::HookOpName;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
constexpr Name kAllGather = Name::ALLGATHER_BASE;
#else
constexpr Name kAllGather = Name::ALLGATHER;
#endif
template <class Make>
void between_hooks(const Target& target, Name name, std::int64_t root, const std::vector<at::Tensor>& inputs,
                   const std::vector<at::Tensor>& outputs, Make&& make) {
  const auto id = target.group->firePreHook(name, false, root, inputs, outputs);
  target.group->firePostHook(name, false, id, make());
}
#else
enum class Name { ALLREDUCE, ALLGATHER, BROADCAST, BARRIER };
constexpr Name kAllGather = Name::ALLGATHER;
template <class Make>
void between_hooks(const Target&, Name, std::int64_t, const std::vector<at::Tensor>&,
                   const std::vector<at::Tensor>&, Make&& make) {
  make();
}
#endif

bool all_reduce(const py::handle& group, const at::Tensor& tensor, const ::c10d::ReduceOp& op) {
  const Target target = target_of(group);
  if (!target.backend || !is_ordinary(tensor)) return false;
  ::c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = false;
  std::vector<at::Tensor> tensors{tensor};
  const py::gil_scoped_release unlocked;
  between_hooks(target, Name::ALLREDUCE, -1, tensors, tensors,
                [&] { return target.backend->allreduce(tensors, options); });
  return true;
}

bool all_gather(const py::handle& group, at::Tensor output, at::Tensor input) {
  const Target target = target_of(group);
  if (!target.backend || !is_ordinary(output) || !is_ordinary(input)) return false;
  ::c10d::AllgatherOptions options;
  options.asyncOp = false;
  const py::gil_scoped_release unlocked;
  between_hooks(target, kAllGather, -1, {input}, {output},
                [&] { return target.backend->_allgather_base(output, input, options); });
  return true;
}

bool broadcast(const py::handle& group, const at::Tensor& tensor, std::int64_t root) {
  const Target target = target_of(group);
  if (!target.backend || !is_ordinary(tensor)) return false;
  ::c10d::BroadcastOptions options;
  options.rootRank = root;
  options.asyncOp = false;
  std::vector<at::Tensor> tensors{tensor};
  const py::gil_scoped_release unlocked;
  between_hooks(target, Name::BROADCAST, root, tensors, tensors,
                [&] { return target.backend->broadcast(tensors, options); });
  return true;
}

bool barrier(const py::handle& group) {
  const Target target = target_of(group);
  // Where there is a GPU, torch's barrier is one of its streams too.
  if (!target.backend || !target.backend->host_only()) return false;
  ::c10d::BarrierOptions options;
  options.asyncOp = false;
  const py::gil_scoped_release unlocked;
  between_hooks(target, Name::BARRIER, -1, {}, {}, [&] { return target.backend->barrier(options); });
  return true;
}

}  // namespace

void bind_direct(py::module_& m) {
  // torch's enumeration and its class are two Python types; the first converts to the second only slowly.
  m.def(
      "direct_all_reduce",
      [](const py::handle& group, const at::Tensor& tensor, ::c10d::ReduceOp::RedOpType op) {
        return all_reduce(group, tensor, op);
      },
      py::arg("group"), py::arg("tensor"), py::arg("op"));
  m.def("direct_all_reduce", &all_reduce, py::arg("group"), py::arg("tensor"), py::arg("op"));
  m.def("direct_all_gather", &all_gather, py::arg("group"), py::arg("output"), py::arg("input"));
  m.def("direct_broadcast", &broadcast, py::arg("group"), py::arg("tensor"), py::arg("root"));
  m.def("direct_barrier", &barrier, py::arg("group"));
}

}  // namespace fccl::bindings
