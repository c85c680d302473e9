// fccl._C.direct_*: collectives beneath torch's wrapper. For people: python/fccl/direct.py.
//
// Each returns false, having done nothing, where the call must go through torch.distributed.
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <vector>

#include "bindings/bindings.h"
#include "c10d/backend.h"

namespace fccl::bindings {
namespace {

using c10d_backend::FcclBackend;

// The ranks of a group may come to different answers: a call is the same one on either way.
c10::intrusive_ptr<FcclBackend> backend_for(const py::handle& group) {
  if (!py::isinstance<::c10d::ProcessGroup>(group) || c10::impl::dispatch_mode_enabled()) return {};
  const auto pg = group.cast<c10::intrusive_ptr<::c10d::ProcessGroup>>();
  // torch throws where the group has no backend for the device, and says so better when it is asked.
  const auto& types = pg->getDeviceTypes();
  if (std::find_if(types.begin(), types.end(), [](const auto& device) { return device.is_cpu(); }) ==
      types.end()) {
    return {};
  }
  return c10::dynamic_intrusive_pointer_cast<FcclBackend>(pg->getBackend(c10::DeviceType::CPU));
}

// The backend refuses what is wrong with a CPU tensor as it does behind torch's wrapper.
bool is_ordinary(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && !at::isTensorSubclassLike(tensor);
}

bool all_reduce(const py::handle& group, const at::Tensor& tensor, const ::c10d::ReduceOp& op) {
  const auto backend = backend_for(group);
  if (!backend || !is_ordinary(tensor)) return false;
  ::c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = false;
  std::vector<at::Tensor> tensors{tensor};
  const py::gil_scoped_release unlocked;
  backend->allreduce(tensors, options);
  return true;
}

bool all_gather(const py::handle& group, at::Tensor output, at::Tensor input) {
  const auto backend = backend_for(group);
  if (!backend || !is_ordinary(output) || !is_ordinary(input)) return false;
  ::c10d::AllgatherOptions options;
  options.asyncOp = false;
  const py::gil_scoped_release unlocked;
  backend->_allgather_base(output, input, options);
  return true;
}

bool broadcast(const py::handle& group, const at::Tensor& tensor, std::int64_t root) {
  const auto backend = backend_for(group);
  if (!backend || !is_ordinary(tensor)) return false;
  ::c10d::BroadcastOptions options;
  options.rootRank = root;
  options.asyncOp = false;
  std::vector<at::Tensor> tensors{tensor};
  const py::gil_scoped_release unlocked;
  backend->broadcast(tensors, options);
  return true;
}

bool barrier(const py::handle& group) {
  const auto backend = backend_for(group);
  // Where there is a GPU, torch's barrier is one of its streams too.
  if (!backend || !backend->host_only()) return false;
  ::c10d::BarrierOptions options;
  options.asyncOp = false;
  const py::gil_scoped_release unlocked;
  backend->barrier(options);
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
