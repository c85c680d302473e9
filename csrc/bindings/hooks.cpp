// fccl._C.AllReduce, fccl._C.BF16Compress, fccl._C.register_comm_hook. For people: python/fccl/hooks.py.
#include <memory>
#include <utility>

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "bindings/bindings.h"
#include "c10d/hook_mean.h"

namespace fccl::bindings {
namespace {

using hooks::ProcessGroupPtr;
using FutureWrapper = torch::jit::PythonFutureWrapper;

// One bucket through a hook that no reducer owns: the plain Python form.
std::shared_ptr<FutureWrapper> run(hooks::GradientHook& hook, const ProcessGroupPtr& group,
                                   ::c10d::GradBucket& bucket) {
  const hooks::ExchangeContext context{group, nullptr};
  return std::make_shared<FutureWrapper>(hook.run(context, bucket));
}

std::shared_ptr<hooks::JoinState> register_comm_hook(const std::shared_ptr<::c10d::Reducer>& reducer,
                                                     const ProcessGroupPtr& group,
                                                     std::shared_ptr<hooks::GradientHook> hook) {
  auto join = std::make_shared<hooks::JoinState>();
  reducer->register_comm_hook(std::make_unique<hooks::DdpHook>(std::move(hook), group, join));
  return join;
}

}  // namespace

void bind_hooks(py::module_& module) {
  using hooks::GradientHook;
  py::class_<GradientHook, std::shared_ptr<GradientHook>>(module, "GradientHook")
      .def_property_readonly("name", &GradientHook::name)
      .def("run", &run, py::arg("process_group"), py::arg("bucket"),
           py::call_guard<py::gil_scoped_release>());
  py::class_<hooks::AllReduce, GradientHook, std::shared_ptr<hooks::AllReduce>>(module, "AllReduce")
      .def(py::init<>());
  py::class_<hooks::BF16Compress, GradientHook, std::shared_ptr<hooks::BF16Compress>>(module, "BF16Compress")
      .def(py::init<>());

  using hooks::JoinState;
  py::class_<JoinState, std::shared_ptr<JoinState>>(module, "JoinState")
      .def_property(
          "divide_by_active_ranks",
          [](const JoinState& state) { return state.divide_by_active_ranks.load(); },
          [](JoinState& state, bool value) { state.divide_by_active_ranks = value; })
      .def_property(
          "has_data", [](const JoinState& state) { return state.has_data.load(); },
          [](JoinState& state, bool value) { state.has_data = value; });

  // Without the GIL: the reducer's mutex may be held by a thread that wants it.
  module.def("register_comm_hook", &register_comm_hook, py::arg("reducer"), py::arg("process_group"),
             py::arg("hook"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace fccl::bindings
