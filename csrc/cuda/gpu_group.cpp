#include "cuda/gpu_group.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "common/deadline.h"
#include "cuda/all_reduce.h"
#include "cuda/gather_broadcast.h"

namespace fccl::cuda {
namespace {

// Says what went wrong on this rank, so that all learn it.
template <class Step>
void try_step(RankTerms& own, Step step) {
  if (own.usable == 0) return;
  try {
    step();
  } catch (const std::exception& error) {
    own.refuse(error.what());
  }
}

std::uint64_t nanoseconds(std::chrono::milliseconds timeout) {
  // A kernel compares clocks by their difference, which must stay positive.
  const auto most = std::chrono::hours(24 * 365);
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds(std::min<std::chrono::milliseconds>(timeout, most)).count());
}

std::string what_was_done(const GpuCall& call) {
  if (call.collective == Collective::kRejected)
    return "refused the call it was to make; its own error says why";
  return "called " + call.to_string();
}

}  // namespace

std::unique_ptr<GpuGroup> GpuGroup::connect(GpuGroupConfig config, Peers& peers, std::string& why_not) {
  Runtime& gpu = *config.runtime;
  if (peers.size() > kMaxRanks || peers.size() < 2) {  // which all ranks know without asking
    why_not = settle_devices(std::vector<RankTerms>(static_cast<std::size_t>(peers.size()))).why_not;
    return nullptr;
  }
  RankTerms own;
  own.half_bytes = config.half_bytes;
  own.deterministic = config.deterministic ? 1 : 0;
  own.float32_accumulation = config.float32_accumulation ? 1 : 0;
  own.may_share_gpu = config.may_share_gpu ? 1 : 0;
  try_step(own, [&] { own.device = gpu.facts(); });
  std::vector<RankTerms> all = gather(peers, own);
  Terms terms = settle_devices(all);
  if (terms.usable) {
    try_step(own, [&] {
      for (std::size_t rank = 0; rank < all.size(); ++rank) {
        if (static_cast<int>(rank) == peers.rank()) continue;
        // A GPU is no peer of its own, as drivers see it; its own memory it does reach.
        const bool shared = all[rank].device.uuid == own.device.uuid;
        own.links[rank] = shared ? Link::kNvlink : gpu.link_to(all[rank].device.uuid);
      }
    });
    all = gather(peers, own);
    terms = settle(all);
  }
  if (!terms.usable) {
    why_not = terms.why_not;
    return nullptr;
  }
  if (config.prove) {
    const std::string why = config.prove(terms, all);
    why_not = jointly(peers, [&] {
      if (!why.empty()) throw Error(ErrorKind::kSystem, why);
    });
    if (!why_not.empty()) return nullptr;
  }
  // Loading a kernel may wait for all that runs on the device: not behind a kernel that waits for this one.
  why_not = jointly(peers, [&] { gpu.load_kernels(); });
  if (!why_not.empty()) return nullptr;
  auto workspaces = Workspaces::connect(config.runtime, peers, terms.half_bytes, why_not);
  if (workspaces == nullptr) return nullptr;
  return std::unique_ptr<GpuGroup>(
      new GpuGroup(std::move(config), peers.rank(), std::move(terms), std::move(workspaces)));
}

GpuGroup::GpuGroup(GpuGroupConfig config, int rank, Terms terms, std::shared_ptr<Workspaces> workspaces)
    : config_(std::move(config)),
      rank_(rank),
      terms_(std::move(terms)),
      chain_(*config_.runtime),
      workspaces_(std::move(workspaces)) {}

GpuGroup::~GpuGroup() { close(nullptr); }

LaunchPlan GpuGroup::plan(const GpuCall& call, StreamHandle stream) {
  LaunchPlan plan;
  plan.reason = "larger than any workspace";
  if (call.count >= GpuCall::kCountLimit) return plan;
  plan = plan_launch(terms_.question(call.collective, call.op, call.dtype, call.count * size_of(call.dtype)));
  if (plan.algorithm == Algorithm::kInner) return plan;
  if (!is_warm() && config_.runtime->capture_of(stream) != 0) {
    plan = {};
    plan.reason = "captured, and no workspace for graphs: fccl.cuda.warm_up(group) makes one";
  }
  return plan;
}

// Throws if the group has failed.
std::shared_ptr<Workspaces> GpuGroup::workspaces_for(StreamHandle stream) {
  const bool captured = config_.runtime->capture_of(stream) != 0;
  const std::lock_guard lock(state_mutex_);
  if (const auto& failure = look_for_failure()) throw Error(*failure);
  if (workspaces_ == nullptr) {
    throw Error(ErrorKind::kAborted, "fccl on the GPU of rank " + std::to_string(rank_) + ": group '" +
                                         config_.name + "' was closed");
  }
  if (!captured) return workspaces_;
  for_graphs_->keep();
  return for_graphs_;
}

template <class Put>
void GpuGroup::put_in_turn(const GpuCall& call, StreamHandle stream, Put put) {
  std::string why;
  try {
    chain_.enter(stream);
    put();
    chain_.leave(stream);
    return;
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {
    why = "an exception that is not a std::exception";
  }
  // This rank is a launch short now, and its next one would meet the peers' last.
  abort(call.to_string() + " could not be launched: " + why);
  const std::lock_guard state(state_mutex_);
  throw Error(*failure_);
}

void GpuGroup::launch(const LaunchPlan& plan, const GpuCall& call, const void* input, void* output,
                      StreamHandle stream, std::optional<std::chrono::milliseconds> timeout) {
  const std::lock_guard lock(launch_mutex_);
  const auto workspaces = workspaces_for(stream);
  const Session session = workspaces->session(call.pack(), nanoseconds(timeout.value_or(config_.timeout)));
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  const std::uint64_t bytes = call.count * size_of(call.dtype);
  put_in_turn(call, stream, [&] {
    switch (plan.algorithm) {
      case Algorithm::kOneShotAllReduce:
      case Algorithm::kTwoShotAllReduce: {
        const AllReduceArgs args{session, from, to, bytes, call.op};
        config_.runtime->launch(plan, &args, stream);
        break;
      }
      case Algorithm::kOneShotAllGather: {
        const AllGatherArgs args{session, from, to, bytes};
        config_.runtime->launch(plan, &args, stream);
        break;
      }
      case Algorithm::kBroadcast: {
        const BroadcastArgs args{session, to, bytes, call.root};
        config_.runtime->launch(plan, &args, stream);
        break;
      }
      case Algorithm::kInner: throw Error(ErrorKind::kInvalid, "planned for the inner engine");
    }
  });
  const std::lock_guard state(state_mutex_);
  ++launches_[plan.algorithm];
}

void GpuGroup::refuse(StreamHandle stream) {
  const std::lock_guard lock(launch_mutex_);
  const auto workspaces = workspaces_for(stream);
  GpuCall call;
  call.collective = Collective::kRejected;
  const Session session = workspaces->session(call.pack(), nanoseconds(config_.timeout));
  // One block, and no bytes: float32, whose poison is NaN and not the end of the context.
  LaunchPlan plan;
  plan.algorithm = Algorithm::kOneShotAllReduce;
  plan.element = DType::kFloat32;
  plan.blocks = 1;
  plan.threads = 32;
  plan.reason = "a refused call";
  static_assert(kMaxRanks <= 32);  // a thread for each peer
  put_in_turn(call, stream, [&] {
    const AllReduceArgs args{session, nullptr, nullptr, 0, ReduceOp::kSum};
    config_.runtime->launch(plan, &args, stream);
  });
}

std::map<std::string, std::int64_t> GpuGroup::launch_counts() const {
  const std::lock_guard lock(state_mutex_);
  std::map<std::string, std::int64_t> counts;
  for (const auto& [algorithm, count] : launches_) counts[name_of(algorithm)] = count;
  return counts;
}

void GpuGroup::enter_inner(StreamHandle stream) {
  const std::lock_guard lock(launch_mutex_);
  chain_.enter(stream);
}

void GpuGroup::leave_inner(StreamHandle stream) {
  const std::lock_guard lock(launch_mutex_);
  chain_.leave(stream);
}

void GpuGroup::warm_up(Peers& peers) {
  if (is_warm()) return;  // on all ranks, since all make it together
  std::string why_not;
  std::shared_ptr<Workspaces> made = Workspaces::connect(config_.runtime, peers, terms_.half_bytes, why_not);
  if (made == nullptr)
    throw Error(ErrorKind::kSystem, "fccl warm_up on rank " + std::to_string(rank_) + " of group '" +
                                        config_.name + "': no workspace for graphs: " + why_not);
  const std::lock_guard lock(state_mutex_);
  for_graphs_ = std::move(made);
}

bool GpuGroup::is_warm() const {
  const std::lock_guard lock(state_mutex_);
  return for_graphs_ != nullptr;
}

std::optional<Error> GpuGroup::failure_of(const Workspaces& workspaces) const {
  const Status status = workspaces.status();
  if (status.failure == 0) return std::nullopt;
  const GpuCall mine = GpuCall::unpack(status.mine);
  const std::string peer = "rank " + std::to_string(status.peer);
  const std::string where = "fccl " + mine.to_string() + " on the GPU of rank " + std::to_string(rank_) +
                            " of group '" + config_.name + "', launch #" + std::to_string(status.generation) +
                            ": ";
  const std::string end =
      " The output is NaN (of integers: undefined), and the group cannot be used any more.";
  switch (static_cast<Failure>(status.failure)) {
    case Failure::kExpired:
      return Error(ErrorKind::kTimeout, where + peer + " did not come within " +
                                            std::to_string(status.timeout_ns / 1'000'000) +
                                            " ms; it may have ended, or wait elsewhere." + end);
    case Failure::kMismatch:
      // Not kMismatch, after which a group goes on: this one's launches are out of step.
      return Error(ErrorKind::kPeerFailed, where + "ranks made calls that do not fit: rank " +
                                               std::to_string(rank_) + ' ' + what_was_done(mine) + "; " +
                                               peer + ' ' + what_was_done(GpuCall::unpack(status.theirs)) +
                                               "." + end);
    case Failure::kAborted:
    case Failure::kNone: break;
  }
  if (static_cast<int>(status.peer) == rank_ && !lost_.empty())
    return Error(ErrorKind::kPeerDied, where + lost_ + "." + end);
  if (static_cast<int>(status.peer) == rank_)
    return Error(ErrorKind::kAborted, where + "aborted here." + end);
  return Error(ErrorKind::kPeerFailed, where + peer + " gave up; its own error says why." + end);
}

const std::optional<Error>& GpuGroup::look_for_failure() const {
  for (const auto* workspaces : {&workspaces_, &for_graphs_}) {
    if (!failure_ && *workspaces != nullptr) failure_ = failure_of(**workspaces);
  }
  return failure_;
}

std::optional<Error> GpuGroup::failure() const {
  const std::lock_guard lock(state_mutex_);
  return look_for_failure();
}

void GpuGroup::abort(const std::string& why) noexcept {
  std::shared_ptr<Workspaces> all[2];
  {
    const std::lock_guard lock(state_mutex_);
    if (!failure_)
      failure_ = Error(ErrorKind::kAborted, "fccl on the GPU of rank " + std::to_string(rank_) +
                                                " of group '" + config_.name + "': " + why);
    all[0] = workspaces_;
    all[1] = for_graphs_;
  }
  for (const auto& workspaces : all) {
    if (workspaces != nullptr) workspaces->abort();
  }
}

void GpuGroup::end_waits(const std::string& why) noexcept {
  std::shared_ptr<Workspaces> all[2];
  {
    const std::lock_guard lock(state_mutex_);
    lost_ = why;
    all[0] = workspaces_;
    all[1] = for_graphs_;
  }
  for (const auto& workspaces : all) {
    if (workspaces != nullptr) workspaces->abort_own();
  }
}

bool GpuGroup::is_idle(const Deadline& deadline) {
  for (;;) {
    {
      const std::unique_lock lock(launch_mutex_, std::try_to_lock);
      if (lock && chain_.is_idle()) return true;  // else a launch is blocked behind kernels that wait
    }
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void GpuGroup::close(Peers* peers) noexcept {
  bool idle = is_idle(Deadline::after(config_.grace));
  if (!idle) {
    abort("it was closed while operations were under way");
    idle = is_idle(Deadline::after(config_.grace));
  }
  std::shared_ptr<Workspaces> all[2];
  {
    const std::lock_guard lock(state_mutex_);
    all[0].swap(workspaces_);
    all[1].swap(for_graphs_);
  }
  for (const auto& workspaces : all) {
    if (workspaces == nullptr) continue;
    if (!idle) workspaces->keep();  // something hangs on the device, and may still use them
    workspaces->close(peers);
  }
}

}  // namespace fccl::cuda
