#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "capture.h"
#include "streams.h"

namespace fccl::sim {
namespace {

struct Range {
  std::size_t bytes = 0;
  Place place = Place::kHost;
  int descriptor = -1;
};
struct Memory {
  std::mutex mutex;
  std::map<const std::byte*, Range> ranges;
  Counts counts;
};
Memory& memory() {
  static auto* memory = new Memory();
  return *memory;
}

const std::byte* bytes_at(const void* address) { return static_cast<const std::byte*>(address); }

// With the mutex held.
std::map<const std::byte*, Range>::const_iterator find(const void* address) {
  const auto& ranges = memory().ranges;
  auto found = ranges.upper_bound(bytes_at(address));
  if (found == ranges.begin()) return ranges.end();
  --found;
  return bytes_at(address) < found->first + found->second.bytes ? found : ranges.end();
}

}  // namespace

Place place_of(const void* address) {
  const std::lock_guard lock(memory().mutex);
  const auto found = find(address);
  return found == memory().ranges.end() ? Place::kHost : found->second.place;
}

void remember(void* address, std::size_t bytes, Place place, int descriptor) {
  const std::lock_guard lock(memory().mutex);
  memory().ranges[bytes_at(address)] = {bytes, place, descriptor};
}

std::size_t forget(const void* address, int* descriptor) {
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().ranges.find(bytes_at(address));
  if (found == memory().ranges.end()) return 0;
  const Range range = found->second;
  memory().ranges.erase(found);
  if (descriptor != nullptr) *descriptor = range.descriptor;
  return range.bytes;
}

int make_shareable(std::size_t bytes) {
  const int descriptor = ::memfd_create("simulated device memory", MFD_CLOEXEC);
  if (descriptor >= 0 && ::ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    ::close(descriptor);
    return -1;
  }
  return descriptor;
}

void* map_shareable(int descriptor, std::size_t bytes) {
  void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return at == MAP_FAILED ? nullptr : at;
}

void count(long Counts::* what, long change) {
  const std::lock_guard lock(memory().mutex);
  memory().counts.*what += change;
}

}  // namespace fccl::sim

using namespace fccl::sim;

// For tests: allocations by cudaMalloc, by cudaHostAlloc, handles, mappings, opened IPC handles.
FCCL_SIM_EXPORT void fccl_sim_counts(long to[5]) {
  const std::lock_guard lock(memory().mutex);
  const Counts& counts = memory().counts;
  const long all[] = {counts.device, counts.pinned, counts.handles, counts.mappings, counts.opened};
  std::memcpy(to, all, sizeof(all));
}

// ---- allocation ----

FCCL_SIM_EXPORT cudaError_t cudaMalloc(void** to, size_t bytes) {
  if (const auto error = trouble("cudaMalloc")) return told(error);
  if (const auto error = forbidden_in_capture("cudaMalloc")) return told(error);
  use_device();
  const std::size_t size = (bytes + 4095) / 4096 * 4096;
  const int descriptor = make_shareable(size);
  void* const at = descriptor < 0 ? nullptr : map_shareable(descriptor, size);
  if (at == nullptr) {
    if (descriptor >= 0) ::close(descriptor);
    return told(cudaErrorMemoryAllocation);
  }
  std::memset(at, 0xa5, std::min<std::size_t>(size, 4 << 20));  // never what somebody might hope for
  remember(at, size, Place::kDevice, descriptor);
  count(&Counts::device, 1);
  *to = at;
  return cudaSuccess;
}

// As the real one it waits for all that runs on the device.
FCCL_SIM_EXPORT cudaError_t cudaFree(void* at) {
  if (at == nullptr) return cudaSuccess;
  if (const auto error = forbidden_in_capture("cudaFree")) return told(error);
  wait_for_all_streams();
  int descriptor = -1;
  const std::size_t size = forget(at, &descriptor);
  if (size == 0) return told(cudaErrorInvalidValue);
  ::munmap(at, size);
  ::close(descriptor);
  count(&Counts::device, -1);
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaHostAlloc(void** to, size_t bytes, unsigned) {
  if (const auto error = trouble("cudaHostAlloc")) return told(error);
  if (const auto error = forbidden_in_capture("cudaHostAlloc")) return told(error);
  use_device();
  const std::size_t size = (bytes + 4095) / 4096 * 4096;
  void* const at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return told(cudaErrorMemoryAllocation);
  std::memset(at, 0xa5, std::min<std::size_t>(size, 4 << 20));
  remember(at, size, Place::kPinned);
  count(&Counts::pinned, 1);
  *to = at;
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaFreeHost(void* at) {
  if (at == nullptr) return cudaSuccess;
  if (const auto error = forbidden_in_capture("cudaFreeHost")) return told(error);
  wait_for_all_streams();
  const std::size_t size = forget(at);
  if (size == 0) return told(cudaErrorInvalidValue);
  ::munmap(at, size);
  count(&Counts::pinned, -1);
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = std::size_t{8} << 30;
  *free = std::size_t{7} << 30;
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* to, const void* at) {
  *to = {};
  switch (place_of(at)) {
    case Place::kHost: to->type = cudaMemoryTypeUnregistered; break;
    case Place::kPinned: to->type = cudaMemoryTypeHost; break;
    case Place::kDevice: to->type = cudaMemoryTypeDevice; break;
  }
  to->device = current_device();
  to->devicePointer = to->type == cudaMemoryTypeUnregistered ? nullptr : const_cast<void*>(at);
  to->hostPointer = to->type == cudaMemoryTypeHost ? const_cast<void*>(at) : nullptr;
  return cudaSuccess;
}

// ---- copies ----

FCCL_SIM_EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                            cudaStream_t on) {
  if (const auto error = trouble("cudaMemcpyAsync")) return told(error);
  Stream* const stream = find_stream(on);
  if (stream == nullptr) return told(cudaErrorInvalidResourceHandle);
  const bool to_device = place_of(to) == Place::kDevice;
  const bool from_device = place_of(from) == Place::kDevice;
  // The direction that is said must be the one that is meant.
  if (kind != cudaMemcpyDefault &&
      ((kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) != to_device ||
       (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice) != from_device)) {
    return told(cudaErrorInvalidValue);
  }
  note("copy %zu bytes on stream %p", bytes, static_cast<void*>(on));
  const auto captures = [&] {
    const std::lock_guard lock(graphs_mutex());
    return stream->capture != nullptr;
  };
  if (place_of(from) == Place::kHost && !captures()) {
    // Memory that is not pinned has been read when the call returns.
    auto copy = std::make_shared<std::vector<std::byte>>(bytes_at(from), bytes_at(from) + bytes);
    return told(stream->put([copy, to, bytes] { std::memcpy(to, copy->data(), bytes); }));
  }
  const auto error = stream->put([to, from, bytes] { std::memmove(to, from, bytes); });
  if (error != cudaSuccess || place_of(to) != Place::kHost || captures()) return told(error);
  return cudaStreamSynchronize(on);  // nor is it written to afterwards
}

FCCL_SIM_EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (const auto error = forbidden_in_capture("cudaMemcpy")) return told(error);
  const auto error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}

FCCL_SIM_EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                                cudaStream_t on) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, on);
}

FCCL_SIM_EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t on) {
  if (const auto error = trouble("cudaMemsetAsync")) return told(error);
  Stream* const stream = find_stream(on);
  if (stream == nullptr) return told(cudaErrorInvalidResourceHandle);
  if (place_of(to) == Place::kHost) return told(cudaErrorInvalidValue);
  return told(stream->put([to, value, bytes] { std::memset(to, value, bytes); }));
}

// ---- the older way to share memory: whose descriptor it is ----

namespace {
struct IpcHandle {
  std::uint64_t process;
  std::uint64_t descriptor;
  std::uint64_t bytes;
};
static_assert(sizeof(IpcHandle) <= sizeof(cudaIpcMemHandle_t));
}  // namespace

FCCL_SIM_EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* to, void* at) {
  if (const auto error = trouble("cudaIpcGetMemHandle")) return told(error);
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().ranges.find(bytes_at(at));
  if (found == memory().ranges.end() || found->second.place != Place::kDevice || found->second.descriptor < 0)
    return told(cudaErrorInvalidValue);
  const IpcHandle handle{static_cast<std::uint64_t>(::getpid()),
                         static_cast<std::uint64_t>(found->second.descriptor), found->second.bytes};
  *to = {};
  std::memcpy(to, &handle, sizeof(handle));
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaIpcOpenMemHandle(void** to, cudaIpcMemHandle_t from, unsigned flags) {
  if (const auto error = trouble("cudaIpcOpenMemHandle")) return told(error);
  if (flags != cudaIpcMemLazyEnablePeerAccess) return told(cudaErrorInvalidValue);
  IpcHandle handle{};
  std::memcpy(&handle, &from, sizeof(handle));
  if (handle.process == static_cast<std::uint64_t>(::getpid())) return told(cudaErrorInvalidValue);
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%llu/fd/%llu", static_cast<unsigned long long>(handle.process),
                static_cast<unsigned long long>(handle.descriptor));
  const int descriptor = ::open(path, O_RDWR | O_CLOEXEC);
  void* const at = descriptor < 0 ? nullptr : map_shareable(descriptor, handle.bytes);
  if (descriptor >= 0) ::close(descriptor);
  if (at == nullptr) return told(cudaErrorInvalidValue);
  remember(at, handle.bytes, Place::kDevice);
  count(&Counts::opened, 1);
  *to = at;
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaIpcCloseMemHandle(void* at) {
  const std::size_t bytes = forget(at);
  if (bytes == 0) return told(cudaErrorInvalidValue);
  ::munmap(at, bytes);
  count(&Counts::opened, -1);
  return cudaSuccess;
}
