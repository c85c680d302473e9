// The Python module fccl._C.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "cpu/environment.h"
#include "cpu/group.h"
#include "cpu/handover.h"
#include "cpu/kernels/reduce.h"
#if FCCL_CUDA_BUILT
#include "cuda/kernels.h"
#endif

namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

// The instruction sets that this build holds and this machine runs, best last.
std::string isas() {
  std::string text;
  for (const auto isa : {fccl::cpu::Isa::kPortable, fccl::cpu::Isa::kAvx2, fccl::cpu::Isa::kAvx512}) {
    if (!fccl::cpu::isa_available(isa)) continue;
    if (!text.empty()) text += " ";
    text += fccl::cpu::name_of(isa);
  }
  return text;
}

// The CUDA kernels that are linked in.
std::size_t cuda_kernel_count() {
#if FCCL_CUDA_BUILT
  return fccl::cuda::collective_kernel_count() + fccl::cuda::bucket_kernel_count() +
         fccl::cuda::pack_kernel_count();
#else
  return 0;
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "fccl's compiled part. Use the fccl package instead of importing this.";
  m.def("build_info", [] {
    py::dict info;
    info["version"] = FCCL_VERSION;
    info["torch_version"] = FCCL_TORCH_VERSION;
    info["cuda"] = static_cast<bool>(FCCL_CUDA_BUILT);
    info["cuda_architectures"] = FCCL_CUDA_ARCHITECTURES;
    info["compiler"] = compiler();
    info["isas"] = isas();
    return info;
  });
  m.def("cuda_kernel_count", &cuda_kernel_count);
  m.def("selected_isa", [] { return std::string(fccl::cpu::name_of(fccl::cpu::selected_isa())); });
  m.def("why_no_shared_memory", &fccl::cpu::why_no_shared_memory, py::call_guard<py::gil_scoped_release>());
  m.def("large_pages", [] { return std::string(fccl::cpu::name_of(fccl::cpu::large_pages())); });
  m.def(
      "handover_ns",
      []() -> std::optional<std::pair<double, double>> {
        const auto found = fccl::cpu::measure_handover();
        if (!found) return std::nullopt;
        return std::pair(found->nearest_ns, found->farthest_ns);
      },
      py::call_guard<py::gil_scoped_release>());
  fccl::bindings::bind_backend(m);
  fccl::bindings::bind_direct(m);
  fccl::bindings::bind_hooks(m);
  fccl::bindings::bind_memory(m);
}
