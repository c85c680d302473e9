// The kernels that a simulated device can run: fccl's own, and the few of torch's that make tests bearable.
#pragma once

#include <functional>
#include <string>

namespace fccl::sim {

struct Grid {
  unsigned blocks = 0;
  unsigned threads = 0;
};

// Makes the work of one launch: copies what the parameters point to.
using Prepare = std::function<std::function<void()>(const Grid& grid, void** parameters)>;

// `name`: of the device's function, demangled. Null if there is no such kernel.
Prepare find_fccl_kernel(const std::string& name);
Prepare find_torch_kernel(const std::string& name);

// Names as the compiler says them.
std::string demangled(const char* mangled);

}  // namespace fccl::sim
