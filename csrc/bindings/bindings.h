// The parts of the Python module fccl._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fccl::bindings {

void bind_backend(py::module_& m);
void bind_direct(py::module_& m);
void bind_hooks(py::module_& m);
void bind_memory(py::module_& m);

}  // namespace fccl::bindings
