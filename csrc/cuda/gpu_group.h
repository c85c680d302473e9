// A group's collectives on its ranks' GPUs: what they agreed on, their workspaces, and the launches.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "common/deadline.h"
#include "common/error.h"
#include "cuda/call.h"
#include "cuda/chain.h"
#include "cuda/peers.h"
#include "cuda/runtime.h"
#include "cuda/terms.h"
#include "cuda/workspaces.h"

namespace fccl::cuda {

struct GpuGroupConfig {
  std::shared_ptr<Runtime> runtime;
  std::string name;  // for messages
  std::chrono::milliseconds timeout{};
  std::chrono::milliseconds grace{3000};  // how long close() waits for the peers' share of what is under way
  // What this rank would like; the least of all ranks holds.
  std::uint64_t half_bytes = std::uint64_t{8} << 20;
  bool deterministic = false;
  bool float32_accumulation = false;
  bool may_share_gpu = false;
  // Tests what the driver says of the links, before anything relies on it; all ranks together. Returns why
  // not, or nothing. Null: the driver is believed.
  std::function<std::string(const Terms& terms, std::span<const RankTerms> ranks)> prove;
};

// Thread-safe, except that calls of one group are made in one order on all ranks, which is the callers' to
// see to.
class GpuGroup {
 public:
  // All ranks together. Null on all of them if their GPUs cannot work together; `why_not` says why.
  static std::unique_ptr<GpuGroup> connect(GpuGroupConfig config, Peers& peers, std::string& why_not);
  ~GpuGroup();

  const Terms& terms() const noexcept { return terms_; }

  // Which engine a call on `stream` goes to. The same on all ranks, if all capture or none does.
  LaunchPlan plan(const GpuCall& call, StreamHandle stream);
  // Puts it on the stream. `plan`: not kInner. kAllGather's `output` has world * count elements, which
  // `input` may be a part of; for kBroadcast `input` is not used. The kernel waits for its peers for as long
  // as `timeout`, or the group's. Throws Error if the group has failed.
  void launch(const LaunchPlan& plan, const GpuCall& call, const void* input, void* output,
              StreamHandle stream, std::optional<std::chrono::milliseconds> timeout = std::nullopt);
  // Takes the place of a call that plan() gave to a kernel and that this rank refuses, whose peers may have
  // launched theirs. A rank that just left it out would leave them waiting for their whole timeout, and then
  // meet their launches with its next one. So an empty kernel comes instead, which says that it is a refusal:
  // ranks that all refuse go on, and where some have not, the group fails at once.
  void refuse(StreamHandle stream);

  // Launches so far, by kernel: "one-shot all_reduce" …
  std::map<std::string, std::int64_t> launch_counts() const;

  // Around an operation of the inner engine, which takes its turn: see chain.h.
  void enter_inner(StreamHandle stream);
  void leave_inner(StreamHandle stream);

  // All ranks together: makes what a captured call needs. Throws Error (kSystem) on all if any rank cannot.
  void warm_up(Peers& peers);
  bool is_warm() const;

  // What a kernel has reported, if one has; the group is of no use then.
  std::optional<Error> failure() const;
  // Fails the group: ends the kernels that wait here and on the peers.
  void abort(const std::string& why) noexcept;
  // Ends the kernels that wait on this rank, now or later, because a rank will not come any more. If none
  // does, nothing has failed: that rank may have done all that was asked of it. `why` starts a sentence's
  // second half.
  void end_waits(const std::string& why) noexcept;
  // Ends it: waits for what is under way, for as long as `grace`, and aborts what is left. All ranks
  // together; without peers if they will not come.
  void close(Peers* peers) noexcept;

 private:
  GpuGroup(GpuGroupConfig config, int rank, Terms terms, std::shared_ptr<Workspaces> workspaces);
  std::optional<Error> failure_of(const Workspaces& workspaces) const;
  // With state_mutex_ held.
  const std::optional<Error>& look_for_failure() const;
  std::shared_ptr<Workspaces> workspaces_for(StreamHandle stream);
  // Between enter() and leave(); whatever goes wrong fails the group on all ranks. With launch_mutex_ held.
  template <class Put>
  void put_in_turn(const GpuCall& call, StreamHandle stream, Put put);
  // Whether the device is done with all launches; waits for that no longer than `deadline`.
  bool is_idle(const Deadline& deadline);

  const GpuGroupConfig config_;
  const int rank_;
  const Terms terms_;

  std::mutex launch_mutex_;  // taken first; held while something is put on a stream
  Chain chain_;

  // Never held during a launch, which may block for as long as kernels wait: abort() must get through.
  mutable std::mutex state_mutex_;
  std::shared_ptr<Workspaces> workspaces_;  // null once closed
  // For graphs: their launches are replayed at times that have nothing to do with the order of other calls,
  // so they must not share generations with them. Outlives the group once a graph has it.
  std::shared_ptr<Workspaces> for_graphs_;
  std::map<Algorithm, std::int64_t> launches_;
  mutable std::optional<Error> failure_;
  std::string lost_;  // end_waits()'s
};

}  // namespace fccl::cuda
