// What fccl does itself for a group's CUDA tensors: collectives by its own kernels where the launch policy
// says so, and the order between these and the inner NCCL's.
//
// Streams are as ProcessGroupNCCL has them: a synchronous call is put on the caller's current stream; an
// asynchronous one on a stream of the engine's, which waits for the caller's, with its tensors kept alive
// until wait(), which makes the then current stream wait for the end. Nothing here blocks the host.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/carrier.h"
#include "c10d/peer_watch.h"
#include "cuda/gpu_group.h"
#include "cuda/wishes.h"

namespace fccl::c10d_backend {

// Whether this build has CUDA kernels.
bool built_with_kernels() noexcept;
// The runtime of a CUDA device; null in builds without.
std::shared_ptr<cuda::Runtime> make_gpu_runtime(c10::Device device);

// What this rank's environment and build ask for.
cuda::Wishes wishes_of_this_process(cuda::InnerEngine inner);

// Tries the links between a group's GPUs in processes of their own (python/fccl/_gpu_probe.py). Set once, by
// the bindings; unset: the driver is believed.
struct GpuProbe {
  std::function<bool()> is_wanted;
  std::function<bool(const std::string& key)> is_proven;
  std::function<std::string()> make_rendezvous;
  std::function<void(const std::string& path)> remove_rendezvous;
  std::function<std::string(const std::string& key, int rank, int size, int device, const std::string& path)>
      run;
};
void set_gpu_probe(GpuProbe probe);

class GpuEngine : public std::enable_shared_from_this<GpuEngine> {
 public:
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

  struct Config {
    c10::Device device{c10::kCUDA, 0};
    std::string group_name;
    std::chrono::milliseconds timeout{};
    cuda::Wishes wishes;
  };

  // The body of a call of the group, on all ranks together. Null on all if their GPUs cannot work together.
  static std::shared_ptr<GpuEngine> connect(const Config& config, Carrier& carrier, const Deadline& deadline,
                                            std::string& why_not);
  GpuEngine(c10::Device device, std::unique_ptr<cuda::GpuGroup> group);

  // The same, for CUDA graphs: see GpuGroup::warm_up().
  void warm_up(Carrier& carrier, const Deadline& deadline);

  // Before the ranks' CPU group ends, which is what is watched. Any thread; idempotent.
  void stop_watching() noexcept;

  c10::Device device() const noexcept { return device_; }
  cuda::GpuGroup& group() noexcept { return *group_; }

  struct Operation {
    cuda::GpuCall call;
    at::Tensor input;   // strided, on this device
    at::Tensor output;  // the same; may be the input
    ::c10d::OpType type;
    const char* title;
    bool async;
    std::chrono::milliseconds timeout;
    bool writes = true;  // false: a broadcast's root, whose tensor stays as it is
  };
  // Which engine a call goes to that is made now: what is being captured may be the inner one's.
  cuda::LaunchPlan plan(const cuda::GpuCall& call) const;
  // `plan`: of this operation, and not the inner engine's. Tensors with gaps are copied on the way, since the
  // plan must not depend on what only one rank knows.
  WorkPtr run(const cuda::LaunchPlan& plan, const Operation& operation, int rank);
  // In place of a call that plan() gives to a kernel and that this rank refuses: see GpuGroup::refuse().
  void refuse() noexcept;
  // Calls `inner`, which makes one collective of the inner engine, when its turn has come.
  WorkPtr in_turn(bool async, const std::function<WorkPtr()>& inner);
  // The same where `inner` only adds to what end_coalesced() makes of it.
  WorkPtr coalesced(const std::function<WorkPtr()>& inner);
  void end_coalesced(::c10d::Work* work);

 private:
  c10::Stream current() const;
  // Makes the engine's stream wait for what is on the current one.
  c10::Stream side_stream();
  void leave_asynchronous(::c10d::Work* work);

  const c10::Device device_;
  const std::unique_ptr<cuda::GpuGroup> group_;
  std::mutex watch_mutex_;
  std::unique_ptr<PeerWatch> watch_;  // ends before group_
  const c10::Stream side_;
  const c10::Stream marker_;  // nothing is put on it: it waits for the ends of what is elsewhere
};

}  // namespace fccl::c10d_backend
