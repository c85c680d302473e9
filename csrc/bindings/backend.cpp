// fccl._C.FcclBackend, and Ctrl-C.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "c10d/backend.h"
#include "c10d/gpu_engine.h"
#include "c10d/process.h"
#include "cpu/group.h"

namespace fccl::bindings {
namespace {

using c10d_backend::FcclBackend;

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Lets Ctrl-C end a wait, on Python's main thread. Only SIGINT: handlers of other signals run once the
// collective has returned, as they do with other backends, because they may want a collective of their own
// (Lightning's SIGTERM handler broadcasts), and this one would be in its way.
void raise_interrupt() {
  if (static_cast<pid_t>(::syscall(SYS_gettid)) != ::getpid()) return;
  if (!Py_IsInitialized() || finalizing()) return;
  const py::gil_scoped_acquire gil;
  if (PyOS_InterruptOccurred() == 0) return;
  const py::object handler = py::module_::import("signal").attr("getsignal")(SIGINT);
  if (PyCallable_Check(handler.ptr()) == 0) return;
  handler(SIGINT, py::none());  // by default raises KeyboardInterrupt
}

void warn_user(const std::string& message) {
  if (!Py_IsInitialized() || finalizing()) return;
  py::gil_scoped_acquire gil;
  try {
    py::module_::import("fccl._warnings").attr("warn_user")(message);
  } catch (py::error_already_set& error) {
    // Where warnings are errors: only one rank warns, and its peers would wait for it for ever.
    error.discard_as_unraisable("a warning of fccl's");
  }
}

c10::intrusive_ptr<FcclBackend> make_backend(c10::intrusive_ptr<::c10d::Store> store, int rank, int size,
                                             std::chrono::milliseconds timeout, std::string group_name,
                                             std::vector<std::uint64_t> global_ranks,
                                             c10d_backend::InnerFactory cpu_factory,
                                             c10d_backend::InnerFactory cuda_factory, bool cuda_by_gloo) {
  FcclBackend::Config config;
  config.store = std::move(store);
  config.rank = rank;
  config.size = size;
  config.timeout = timeout;
  config.group_name = std::move(group_name);
  config.global_ranks = std::move(global_ranks);
  config.cpu_factory = std::move(cpu_factory);
  config.cuda_factory = std::move(cuda_factory);
  config.cuda_by_gloo = cuda_by_gloo;
  // Peers may come late, and the factory takes the lock itself.
  py::gil_scoped_release unlocked;
  return FcclBackend::create(std::move(config));
}

// Each looked up when it is called: a group without GPUs never loads the module.
template <class Result, class... Arguments>
std::function<Result(Arguments...)> of_probe(const char* name) {
  return [name](Arguments... arguments) -> Result {
    const py::gil_scoped_acquire gil;
    const py::object result = py::module_::import("fccl._gpu_probe").attr(name)(arguments...);
    if constexpr (!std::is_void_v<Result>) return result.cast<Result>();
  };
}

c10d_backend::GpuProbe python_probe() {
  c10d_backend::GpuProbe probe;
  probe.is_wanted = of_probe<bool>("is_wanted");
  probe.is_proven = of_probe<bool, const std::string&>("is_proven");
  probe.make_rendezvous = of_probe<std::string>("make_rendezvous");
  probe.remove_rendezvous = of_probe<void, const std::string&>("remove_rendezvous");
  probe.run = of_probe<std::string, const std::string&, int, int, int, const std::string&>("run");
  return probe;
}

}  // namespace

void bind_backend(py::module_& m) {
  // Base classes and Store are registered by torch.
  py::module_::import("torch.distributed");

  c10d_backend::set_interrupt_check(raise_interrupt);
  cpu::set_interrupt_check(c10d_backend::check_interrupt);
  c10d_backend::set_warning_sink(warn_user);
  c10d_backend::set_gpu_probe(python_probe());

  py::class_<FcclBackend, ::c10d::Backend, c10::intrusive_ptr<FcclBackend>>(
      m, "FcclBackend", "The c10d backend of one process group.")
      .def(py::init(&make_backend), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
           py::arg("group_name"), py::arg("global_ranks"), py::arg("cpu_factory"),
           py::arg("cuda_factory") = nullptr, py::arg("cuda_by_gloo") = false)
      .def_property_readonly("engine", &FcclBackend::engine,
                             "What carries CPU collectives: 'shared-memory' or 'inner'.")
      .def_property_readonly("why_inner", &FcclBackend::why_inner,
                             "Why the shared-memory engine does not carry this group; empty while it does.")
      .def_property_readonly("zero_copy_count", &FcclBackend::zero_copy_count,
                             "Finished collectives, and messages sent or received, that found their tensors "
                             "in the ranks' arenas.")
      .def_property_readonly("why_no_zero_copy", &FcclBackend::why_no_zero_copy,
                             "Why no collective of this group can do without copies; empty if some may.")
      .def("collective_counts", &FcclBackend::collective_counts,
           "Finished collectives on CPU tensors, by name.")
      .def_property_readonly(
          "why_no_gpu_kernels",
          py::cpp_function(&FcclBackend::why_no_gpu_kernels, py::call_guard<py::gil_scoped_release>()),
          "Why no CUDA tensor goes through fccl's own kernels; empty if some may, or before "
          "the first collective on CUDA tensors.")
      .def("gpu_launch_counts", &FcclBackend::gpu_launch_counts, py::call_guard<py::gil_scoped_release>(),
           "Launches of fccl's own kernels in this group, by kernel.")
      .def(
          "warm_up",
          [](FcclBackend& backend, std::int64_t device) {
            backend.warm_up(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
          },
          py::arg("device"), py::call_guard<py::gil_scoped_release>(),
          "Makes what fccl's kernels need to be captured into CUDA graphs. Collective.");

  m.def("shutdown_all", &FcclBackend::shutdown_all, py::arg("why"), py::call_guard<py::gil_scoped_release>(),
        "Shuts down every fccl backend of this process, at exit; peers that wait are told why.");
}

}  // namespace fccl::bindings
