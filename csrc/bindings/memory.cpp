// fccl._C.arena_empty and the arena's statistics. For people: python/fccl/memory.py.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "c10d/arena_tensors.h"
#include "cpu/arena.h"

namespace fccl::bindings {
namespace {

at::Tensor arena_empty(const std::vector<std::int64_t>& sizes, at::ScalarType dtype,
                       const std::string& owner) {
  return c10d_backend::arena_empty(sizes, dtype, owner);
}

py::dict memory_stats() {
  py::dict result;
  cpu::Arena* arena = cpu::Arena::of_process();
  const cpu::ArenaStats stats = arena != nullptr ? arena->stats() : cpu::ArenaStats();
  result["capacity"] = stats.capacity;
  result["in_use"] = stats.in_use;
  result["peak"] = stats.peak;
  result["cached"] = stats.cached;
  result["quarantined"] = stats.quarantined;
  result["tensors"] = stats.blocks;
  result["refused"] = stats.refused;
  result["by_owner"] = stats.by_owner;
  result["why_none"] = arena != nullptr ? std::string() : cpu::Arena::why_none();
  return result;
}

void release_cached() {
  if (cpu::Arena* arena = cpu::Arena::of_process()) arena->release_cached();
}

bool in_arena(const at::Tensor& tensor) {
  const cpu::Arena* arena = cpu::Arena::of_process();
  return arena != nullptr && tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() &&
         arena->locate(tensor.storage().data(), 1) != Description::kNowhere;
}

}  // namespace

void bind_memory(py::module_& m) {
  m.def("arena_empty", &arena_empty, py::arg("sizes"), py::arg("dtype"), py::arg("owner"),
        py::call_guard<py::gil_scoped_release>());
  m.def("memory_stats", &memory_stats);
  m.def("release_cached", &release_cached, py::call_guard<py::gil_scoped_release>());
  m.def("in_arena", &in_arena, py::arg("tensor"));
}

}  // namespace fccl::bindings
