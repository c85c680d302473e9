// What the check programs need of a GPU. There are two: a real one (machine_cuda.cpp), and fibres on this CPU
// (machine_host.cpp), on which the same programs run with the same tables of kernels. So it is known without
// a GPU that they pass on right kernels, and that they fail on a result with one wrong bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/kernels.h"

namespace fccl::gpu_check {

using cuda::KernelEntry;

struct Grid {
  unsigned blocks = 1;
  unsigned threads = 32;
};

class Machine {
 public:
  virtual ~Machine() = default;

  virtual std::string name() const = 0;
  // Whether large cases are worth their time here.
  virtual bool is_fast() const = 0;
  virtual unsigned multiprocessors() const = 0;

  // Zeroed memory at a multiple of 256 bytes; lives until release_all().
  virtual std::byte* allocate(std::size_t bytes) = 0;
  // The same, of the host: a kernel writes it while it runs.
  virtual void* allocate_host(std::size_t bytes) = 0;
  virtual void release_all() = 0;
  virtual void copy_in(void* to, const void* from, std::size_t bytes) = 0;
  virtual void copy_out(void* to, const void* from, std::size_t bytes) = 0;

  // Launches on different streams run at once, those of one stream one after the other. Streams are numbers
  // from 0 to 7. finish() waits for all; throws std::runtime_error if the device reports an error.
  virtual void launch(int stream, KernelEntry kernel, Grid grid, const void* args, std::size_t bytes) = 0;
  virtual void finish() = 0;

  template <class Args>
  void launch(int stream, KernelEntry kernel, Grid grid, const Args& args) {
    static_assert(std::is_trivially_copyable_v<Args>);
    launch(stream, kernel, grid, &args, sizeof(args));
  }
  template <class T>
  T* put(const std::vector<T>& values) {
    auto* const at = reinterpret_cast<T*>(allocate(values.size() * sizeof(T)));
    copy_in(at, values.data(), values.size() * sizeof(T));
    return at;
  }
  template <class T>
  std::vector<T> get(const T* from, std::size_t count) {
    std::vector<T> values(count);
    copy_out(values.data(), from, count * sizeof(T));
    return values;
  }
};

// Options are those that begin with "--machine-"; machine_host.cpp has some. Null: there is no such machine,
// and `why_not` says why.
std::unique_ptr<Machine> make_machine(std::span<const std::string> options, std::string& why_not);

}  // namespace fccl::gpu_check
