// The gradient hooks in fccl._C and fccl._C.register_comm_hook. For people: python/fccl/hooks/.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "bindings/bindings.h"
#include "c10d/hook_coded.h"
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

codec::BlockFormat format_named(const std::string& name) {
  if (name == "int8") return codec::BlockFormat::kInt8;
  if (name == "fp8_e4m3") return codec::BlockFormat::kFloat8E4M3;
  if (name == "fp8_e5m2") return codec::BlockFormat::kFloat8E5M2;
  throw py::value_error("no block format '" + name + "'");
}

std::shared_ptr<hooks::BlockQuantize> make_block_quantize(const std::string& format, std::uint32_t block,
                                                          bool error_feedback,
                                                          std::int64_t exempt_below_dimensions) {
  return std::make_shared<hooks::BlockQuantize>(
      hooks::BlockQuantize::Config{format_named(format), block, error_feedback, exempt_below_dimensions});
}

void bind_block_quantize(py::module_& module) {
  using hooks::BlockQuantize;
  py::class_<BlockQuantize, hooks::GradientHook, std::shared_ptr<BlockQuantize>>(module, "BlockQuantize")
      .def(py::init(&make_block_quantize), py::arg("format"), py::arg("block"), py::arg("error_feedback"),
           py::arg("exempt_below_dimensions"))
      .def("set_exempt", &BlockQuantize::set_exempt, py::arg("parameters"))
      .def(
          "remainder",
          [](BlockQuantize& hook, const at::Tensor& parameter) { return hook.remainders().get(parameter); },
          py::arg("parameter"))
      .def(
          "replace_remainders",
          [](BlockQuantize& hook, const std::vector<at::Tensor>& parameters,
             const std::vector<at::Tensor>& values) { hook.remainders().replace(parameters, values); },
          py::arg("parameters"), py::arg("values"));
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

  py::class_<hooks::FP16Compress, GradientHook, std::shared_ptr<hooks::FP16Compress>>(module, "FP16Compress")
      .def(py::init<>());
  bind_block_quantize(module);

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
