// What fccl asks of a GPU and its driver, and nothing else: tests put another one in its place, which has no
// GPU, records what it is asked, and runs the kernels on fibres.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/descriptor.h"
#include "cuda/bucket_args.h"
#include "cuda/policy.h"

namespace fccl::cuda {

using StreamHandle = void*;  // a cudaStream_t; null is the legacy default stream
using EventHandle = void*;   // a cudaEvent_t

struct DeviceFacts {
  std::array<unsigned char, 16> uuid{};
  std::int32_t architecture = 0;  // compute capability: 80, 86, 90, …
  std::int32_t sm_count = 0;
  std::int32_t driver = 0;  // as cudaDriverGetVersion has it
};

// How a peer gets at an allocation. A descriptor works across containers and needs no right to trace the
// peer; a driver or GPU that has none of that has the older IPC handles.
struct Export {
  enum class Kind : std::uint32_t { kDescriptor = 0, kIpcHandle = 1 };
  Kind kind = Kind::kDescriptor;
  std::uint64_t bytes = 0;
  std::array<unsigned char, 64> ipc_handle{};
};

class Runtime {
 public:
  virtual ~Runtime() = default;

  // All members concern one device, the one this object was made for. They throw Error (kSystem). None waits
  // for what the user, or anybody else, has put on the device: that may wait for a peer, and the peer for
  // this rank.
  virtual DeviceFacts facts() = 0;
  // How this device reaches a peer's, as far as the driver says; kNone if it says that it does not. Whether
  // that is true, only a test tells.
  virtual Link link_to(const std::array<unsigned char, 16>& peer_uuid) = 0;

  // Zeroed memory of the device's own, not of any allocator that others use, which peers can map.
  // `descriptor` stays empty if the export is an IPC handle.
  struct Shared {
    std::byte* data = nullptr;
    Export how;
    Descriptor descriptor;
  };
  virtual Shared allocate_shared(std::size_t bytes) = 0;
  virtual void free_shared(const Shared& memory) noexcept = 0;
  virtual std::byte* map_peer(const Export& how, const Descriptor& descriptor) = 0;
  virtual void unmap_peer(const Export& how, std::byte* data) noexcept = 0;

  // Zeroed memory of the host that the device reads and writes at the same address.
  virtual void* allocate_host(std::size_t bytes) = 0;
  virtual void free_host(void* data) noexcept = 0;

  virtual EventHandle make_event() = 0;
  virtual void destroy_event(EventHandle event) noexcept = 0;
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  // Whether the device has come to what was recorded last; never waits.
  virtual bool done(EventHandle event) noexcept = 0;
  // Identifies the graph that the stream is being captured into; 0 if it is not.
  virtual std::uint64_t capture_of(StreamHandle stream) = 0;

  // `args`: the kernel's Args. Never waits for the device.
  virtual void launch(const LaunchPlan& plan, const void* args, StreamHandle stream) = 0;
  // One pass over a bucket: `args` are EncodeBucketArgs, ReduceShardArgs or DecodeBucketArgs. It waits for
  // nobody, so any grid is right. Throws Error (kUnsupported) if there is no such kernel.
  virtual void launch(const BucketLaunch& launch, const void* args, StreamHandle stream) = 0;
  // Loads all kernels, which a capture must not do.
  virtual void load_kernels() = 0;
  // Writes a word of device memory, own or a peer's, beside whatever the device is doing: a kernel that waits
  // must see it. Returns when it is written.
  virtual void poke(std::uint32_t* at, std::uint32_t value) = 0;
};

}  // namespace fccl::cuda
