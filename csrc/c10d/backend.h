// The c10d backend "fccl": one object per process group, for all its devices.
//
// CPU tensors: collectives and messages run on the shared-memory engine or, where ranks share no memory, on
// an inner Gloo; collectives in the order the executor gives them. CUDA tensors go to an inner NCCL, or to a
// second Gloo where that is asked for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "c10d/carrier.h"
#include "c10d/executor.h"
#include "c10d/failure_hooks.h"
#include "c10d/tensors.h"
#include "cuda/wishes.h"

namespace fccl::c10d_backend {

class GpuEngine;

class FcclBackend final : public ::c10d::Backend {
 public:
  struct Config {
    c10::intrusive_ptr<::c10d::Store> store;
    int rank = 0;
    int size = 1;
    std::chrono::milliseconds timeout{};
    std::string group_name;
    std::vector<std::uint64_t> global_ranks;
    InnerFactory cpu_factory;   // Gloo; called if the ranks share no memory
    InnerFactory cuda_factory;  // empty where torch has none; called at the first CUDA tensor
    bool cuda_by_gloo = false;  // what that makes: a Gloo, or the usual NCCL
  };

  using Work = ::c10d::Work;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<Work>;

  static c10::intrusive_ptr<FcclBackend> create(Config config);
  // Shuts down every backend of this process: at exit, while threads can still be joined.
  static void shutdown_all(const std::string& why) noexcept;

  explicit FcclBackend(Config config);
  ~FcclBackend() override;

  // ---- what fccl adds ----
  std::string engine() const;  // "shared-memory" or "inner"
  bool host_only() const noexcept { return !cuda_factory_; }
  std::string why_inner() const { return carrier_->why_inner(); }
  // Of the finished collectives, how many found their tensors in the ranks' arenas; why none ever will.
  std::uint64_t zero_copy_count() const;
  std::string why_no_zero_copy() const;
  std::map<std::string, std::int64_t> collective_counts() const { return carrier_->counts(); }
  // Why no CUDA tensor goes through fccl's own kernels; empty if some may, or if nobody knows yet.
  std::string why_no_gpu_kernels() const;
  std::map<std::string, std::int64_t> gpu_launch_counts() const;
  // Makes the memory with which fccl's kernels can be captured into CUDA graphs; all ranks together.
  void warm_up(const at::Device& device);

  // A gradient hook's exchange of a bucket: several exchanges of memory as one asynchronous call, so that
  // they have their place in the group's order, whatever is called meanwhile. The work's Future has `bucket`.
  using Exchanges = std::function<void(Carrier&, const Deadline&)>;
  WorkPtr exchange_bucket(const at::Tensor& bucket, Exchanges exchanges);

  // ---- collectives (collectives.cpp) ----
  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& opts) override;

  // ---- reductions.cpp ----
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::ReduceScatterOptions& opts) override;

  // ---- exchanges.cpp ----
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
#ifdef C10D_BACKEND_HAS_HOOKS  // torch 2.14
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& opts) override;
#endif
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const ::c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override;

  // ---- sparse.cpp ----
  WorkPtr allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // ---- point-to-point (point_to_point.cpp): beside the executor, without a number ----
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // ---- memory that peers can reach ----
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // ---- life ----
  const std::string getBackendName() const override { return "fccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // starts at 0 on every rank, nothing to agree on
  std::uint64_t getSequenceNumberForGroup() override { return executor_->submitted(); }
  ::c10d::ErrorType getError() override;
  void abort() override;
#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(std::int64_t id, ::c10d::AbortHook hook) override;
  void unregisterAbortHook(std::int64_t id) override;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  bool supportsAbortHooks() const override { return true; }
#endif
#endif
  void shutdown() override;
  void release_resources() override;  // c10's, for intrusive_ptr

 private:
  void shut_down(const std::string& why);

  // One call, as far as all calls are alike.
  struct Call {
    ::c10d::OpType type;
    Collective collective;
    const char* title;
    bool async;
    std::chrono::milliseconds timeout;
  };
  enum class Fault { kValue, kType, kUnsupported };

  Call call(::c10d::OpType type, Collective collective, const char* title, bool async,
            std::chrono::milliseconds timeout) const;

  // Executes body(carrier, deadline) in executor order; here and now if the call is synchronous.
  template <class Body>
  WorkPtr submit(const Call& call, const Tensors& inputs, Tensors outputs, Body body);
  WorkPtr track(WorkPtr work);

  // ---- refusals (checks.cpp): tell the peers, in order, and throw ----
  [[noreturn]] void refuse(const Call& call, Fault fault, const std::string& why);
  [[noreturn]] void throw_refusal(const Call& call, Fault fault, const std::string& why) const;
  const at::Tensor& only(const Call& call, const Tensors& tensors, const char* what);
  void check_dense(const Call& call, const at::Tensor& tensor, const char* what);
  void check_written(const Call& call, const at::Tensor& tensor, const char* what);
  void check_same_type(const Call& call, const at::Tensor& tensor, const at::Tensor& expected,
                       const char* what);
  void check_numel(const Call& call, const at::Tensor& tensor, std::int64_t expected, const char* what);
  void check_length(const Call& call, std::size_t length, std::size_t expected, const char* what);
  void check_root(const Call& call, std::int64_t root);
  Reduction check_reduction(const Call& call, const at::Tensor& tensor, const ::c10d::ReduceOp& op);

  WorkPtr all_reduce_all(const Call& call, Tensors& tensors, const ::c10d::ReduceOp& op);
  WorkPtr sparse_all_reduce(const Call& call, Tensors& tensors, const ::c10d::ReduceOp& op);
  WorkPtr gather_all(const Call& call, const TensorLists& outputs, const Tensors& inputs, Tensors results,
                     bool uneven);
  WorkPtr reduce_scatter_all(const Call& call, Tensors& outputs, Tensors& inputs, const ::c10d::ReduceOp& op);
  WorkPtr exchange(const Call& call, const Tensors& named, Tensors results, Tensors outputs, Tensors inputs);

  // ---- CUDA tensors (cuda_calls.cpp) ----
  // The inner engine, made at the first CUDA tensor.
  ::c10d::Backend& cuda(const Call& call, const at::Tensor& tensor);
  // One operation of the inner engine, in its turn beside fccl's own kernels.
  using InnerCall = std::function<WorkPtr(::c10d::Backend& inner)>;
  WorkPtr on_cuda(const Call& call, const at::Tensor& tensor, const InnerCall& inner);
  // A collective by fccl's own kernels; null if it is the inner engine's. `op` is all_reduce's,
  // `root` broadcast's.
  WorkPtr by_kernel(const Call& call, const at::Tensor& input, const at::Tensor& output,
                    const ::c10d::ReduceOp& op = ::c10d::ReduceOp::SUM, std::int64_t root = 0);
  // Refuses a call that all ranks are known to give to a kernel, if its arguments are not right here.
  void check_for_kernel(const Call& call, GpuEngine& gpu, const at::Tensor& input, const at::Tensor& output,
                        std::int64_t root) const;
  // The engine of these kernels, which all ranks make together at their first collective on CUDA tensors;
  // null if there is none.
  std::shared_ptr<GpuEngine> gpu_engine(const Call& call, const at::Tensor& tensor);
  std::shared_ptr<GpuEngine> gpu_engine() const;
  struct Gpu;
  static void fail(Gpu& gpu);  // with the group on CPU
  bool is_coalescing();
  const char* cuda_inner_name() const noexcept { return cuda_by_gloo_ ? "Gloo" : "NCCL"; }
  std::string no_kernels_because(const std::string& why) const;
  void check_gloo_can(const Call& call, const at::Tensor& tensor);
  // Checks the arguments; throws what torch should see.
  Call point_to_point(::c10d::OpType type, const char* title, const Tensors& tensors, int peer);
  WorkPtr begin_message(const Call& call, const at::Tensor& tensor, int peer, int tag);

  const std::uint64_t born_in_ = fork_generation_now();
  static std::uint64_t fork_generation_now() noexcept;

  std::atomic<std::chrono::milliseconds::rep> timeout_ms_;
  const std::string group_name_;
  const std::vector<std::uint64_t> global_ranks_;
  c10::intrusive_ptr<::c10d::Store> store_;  // this incarnation's own
  InnerFactory cuda_factory_;
  const bool cuda_by_gloo_;
  const cuda::Wishes wishes_;    // this rank's
  cuda::SettledWishes settled_;  // all ranks', since the group was made
  std::mutex cuda_mutex_;
  BackendPtr cuda_inner_;
  // Shared with what runs when the group fails, which may be after this object.
  struct Gpu {
    std::mutex mutex;
    bool settled = false;
    std::shared_ptr<GpuEngine> engine;
    std::string why_none;
  };
  const std::shared_ptr<Gpu> gpu_ = std::make_shared<Gpu>();
  const std::shared_ptr<FailureHooks> failure_hooks_ = std::make_shared<FailureHooks>();
  std::shared_ptr<Carrier> carrier_;
  std::shared_ptr<Executor> executor_;

  // Works submitted between startCoalescing() and endCoalescing() by the thread that began.
  std::atomic<bool> coalescing_{false};
  std::mutex coalescing_mutex_;
  std::thread::id coalescing_thread_;
  std::vector<WorkPtr> coalesced_;
  bool coalesced_on_gpu_ = false;  // collectives among them, which take their turn

  std::atomic<bool> shut_down_{false};
  std::atomic<bool> aborted_{false};  // in a group of one rank
};

// A call on several tensors is several collectives of the carrier. Their number is compared first, or a rank
// with one tensor more would be matched with its peers' next call.
void gate_tensors(Carrier& carrier, Collective collective, const std::vector<at::Tensor>& tensors,
                  ReduceOp op, const Deadline& deadline);

template <class Body>
FcclBackend::WorkPtr FcclBackend::submit(const Call& call, const Tensors& inputs, Tensors outputs,
                                         Body body) {
  auto work = c10::make_intrusive<CollectiveWork>(rank_, call.type, call.title, inputs, std::move(outputs),
                                                  executor_);
  auto run = [carrier = carrier_, collective = call.collective, timeout = call.timeout,
              body = std::move(body)]() mutable { carrier->run(collective, timeout, body); };
  if (call.async) {
    executor_->run_later(work, std::move(run));
  } else {
    executor_->run_now(work, std::move(run));
  }
  return track(std::move(work));
}

}  // namespace fccl::c10d_backend
