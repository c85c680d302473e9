// Gradient hooks: what DDP calls with each full bucket instead of its own all-reduce.
//
// A GradientHook says how one bucket is exchanged, over any backend. What all hooks have in common is here:
// the way into DDP and out of it, errors, and the exact mean of the buckets that a hook does not compress
// (sparse and complex ones always). A hook adds which dtypes it compresses, and how. DdpHook attaches one to
// a model: DDP owns it.
//
// Rules that DDP's reducer sets, and that every hook here keeps:
//  - the hook runs on an autograd thread with the reducer's mutex held. An exception out of it wedges
//    the reducer for good, so run() turns every error into an errored Future: that one is raised from
//    backward() and the next step works again;
//  - with a hook, DDP does not divide: the Future's value is the mean over the ranks;
//  - no Python: nothing here needs the GIL.
#pragma once

#include <atomic>
#include <memory>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace fccl::hooks {

using ::c10d::GradBucket;
using ::c10d::ProcessGroup;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using ProcessGroupPtr = c10::intrusive_ptr<ProcessGroup>;

// How the ranks of one model stand in DDP.join(). Ranks that have run out of data run the hook on
// zero buckets; by default the sum is still divided by the world size, and with
// divide_by_initial_world_size=False by the number of ranks that have data. Only Python sees a join
// context begin, so it writes these; the hook reads them without the GIL.
struct JoinState {
  std::atomic<bool> divide_by_active_ranks{false};  // the same on all ranks
  std::atomic<bool> has_data{true};                 // this rank contributes gradients
};

// What one exchange needs to know.
struct ExchangeContext {
  ProcessGroupPtr group;
  const JoinState* join = nullptr;  // null: divide by the world size

  bool divides_by_active_ranks() const {
    return join && join->divide_by_active_ranks.load(std::memory_order_relaxed);
  }
  bool has_data() const { return !join || join->has_data.load(std::memory_order_relaxed); }
};

class GradientHook {
 public:
  virtual ~GradientHook() = default;

  virtual const char* name() const noexcept = 0;

  // Starts the exchange of a bucket. The Future's value is a tensor, or a list with one, shaped like
  // the bucket's buffer. Never throws and never returns null.
  FuturePtr run(const ExchangeContext& context, GradBucket& bucket) noexcept;

 protected:
  // Whether dense buckets of this dtype are given to exchange(); all others are averaged exactly.
  virtual bool compresses(at::ScalarType) const { return false; }
  // The exchange itself; may throw.
  virtual FuturePtr exchange(const ExchangeContext& context, GradBucket& bucket);
};

// Attaches a hook to one model. One GradientHook may serve several models.
class DdpHook final : public ::c10d::CommHookInterface {
 public:
  DdpHook(std::shared_ptr<GradientHook> hook, ProcessGroupPtr group, std::shared_ptr<JoinState> join);

  FuturePtr runHook(GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;

 private:
  std::shared_ptr<GradientHook> hook_;
  ExchangeContext context_;
  std::shared_ptr<JoinState> join_;
};

}  // namespace fccl::hooks
