#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "simulation.h"

namespace fccl::sim {
namespace {

std::atomic<bool> broken{false};

// What shall fail, by function: the error, and how many calls go well before.
struct Wish {
  int error = 0;
  int after = 0;
};
struct Wishes {
  std::mutex mutex;
  std::map<std::string, Wish> of;

  Wishes() {
    const char* text = std::getenv("FCCL_SIM_FAIL");
    while (text != nullptr && *text != 0) {
      const char* const equals = std::strchr(text, '=');
      if (equals == nullptr) break;
      of[std::string(text, equals)] = Wish{std::atoi(equals + 1), 0};
      text = std::strchr(equals, ',');
      if (text != nullptr) ++text;
    }
  }
};
Wishes& wishes() {
  static auto* wishes = new Wishes();
  return *wishes;
}

}  // namespace

cudaError_t& last_error() {
  thread_local cudaError_t error = cudaSuccess;
  return error;
}

cudaError_t told(cudaError_t error) {
  if (error != cudaSuccess) last_error() = error;
  return error;
}

cudaError_t trouble(const char* function) {
  if (broken) return cudaErrorLaunchFailure;
  Wishes& all = wishes();
  const std::lock_guard lock(all.mutex);
  const auto found = all.of.find(function);
  if (found == all.of.end() || found->second.after-- > 0) return cudaSuccess;
  note("%s fails with %d, as wished", function, found->second.error);
  found->second.after = 0;
  return static_cast<cudaError_t>(found->second.error);
}

void break_context() { broken = true; }
bool is_broken() { return broken; }

cudaError_t not_simulated(const char* what) {
  std::fprintf(stderr, "simulated CUDA: %s is not simulated\n", what);
  note("not simulated: %s", what);
  return cudaErrorNotSupported;
}

}  // namespace fccl::sim

// For tests: `function` fails with `error`, a cudaError_t or CUresult, after so many calls; error 0: it works
// again.
FCCL_SIM_EXPORT void fccl_sim_fail(const char* function, int error, int after) {
  auto& all = fccl::sim::wishes();
  const std::lock_guard lock(all.mutex);
  if (error == 0) {
    all.of.erase(function);
  } else {
    all.of[function] = {error, after};
  }
}

extern "C" int fccl_sim_refuse(const char* name) { return fccl::sim::told(fccl::sim::not_simulated(name)); }

FCCL_SIM_EXPORT cudaError_t cudaGetLastError() {
  if (fccl::sim::is_broken()) return cudaErrorLaunchFailure;
  return std::exchange(fccl::sim::last_error(), cudaSuccess);
}
FCCL_SIM_EXPORT cudaError_t cudaPeekAtLastError() {
  return fccl::sim::is_broken() ? cudaErrorLaunchFailure : fccl::sim::last_error();
}

namespace {
struct Words {
  cudaError_t error;
  const char* name;
  const char* text;
};
constexpr Words kWords[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge", "operation would merge two captures"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in "
     "a capturing stream"},
};
}  // namespace

FCCL_SIM_EXPORT const char* cudaGetErrorString(cudaError_t error) {
  for (const Words& words : kWords) {
    if (words.error == error) return words.text;
  }
  return "an error that the simulation has no words for";
}
FCCL_SIM_EXPORT const char* cudaGetErrorName(cudaError_t error) {
  for (const Words& words : kWords) {
    if (words.error == error) return words.name;
  }
  return "cudaErrorOther";
}
