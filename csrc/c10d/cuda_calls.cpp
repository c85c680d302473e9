// The backend's side of CUDA tensors: which engine gets a call.
#include <utility>

#include <ATen/MemoryOverlap.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "c10d/backend.h"
#include "c10d/errors.h"
#include "c10d/gpu_engine.h"
#include "c10d/store_adapter.h"

namespace fccl::c10d_backend {
namespace {

using ::c10d::OpType;

// What kernels can be given, if need be by way of a copy.
bool is_dense_on_gpu(const at::Tensor& tensor, const c10::Device& device) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.device() == device &&
         !tensor.is_quantized();
}

}  // namespace

::c10d::Backend& FcclBackend::cuda(const Call& c, const at::Tensor& tensor) {
  std::lock_guard lock(cuda_mutex_);
  if (!cuda_inner_) {
    if (!cuda_factory_) {
      refuse(c, Fault::kValue,
             "the tensor is " + (tensor.defined() ? describe(tensor) : std::string("on cuda")) +
                 ", expected a CPU tensor: this torch has no " + cuda_inner_name() + " or sees no GPU");
    }
    cuda_inner_ = cuda_factory_(inner_store(store_, "cuda"));
    if (getBoundDeviceId()) cuda_inner_->setBoundDeviceId(getBoundDeviceId());
    if (is_coalescing() && !cuda_by_gloo_) cuda_inner_->startCoalescing();
  }
  return *cuda_inner_;
}

bool FcclBackend::is_coalescing() {
  if (!coalescing_.load(std::memory_order_relaxed)) return false;
  const std::lock_guard lock(coalescing_mutex_);
  return coalescing_ && coalescing_thread_ == std::this_thread::get_id();
}

// Gloo takes CUDA tensors through copies in pinned memory, for these calls. Others it would read from the
// host at the device's address, or refuse in words that do not say who asked it.
void FcclBackend::check_gloo_can(const Call& c, const at::Tensor& tensor) {
  switch (c.type) {
    case OpType::BROADCAST:
    case OpType::ALLREDUCE:
    case OpType::REDUCE:
    case OpType::ALLGATHER:
    case OpType::_ALLGATHER_BASE:
    case OpType::GATHER:
    case OpType::SCATTER:
    case OpType::ALLTOALL_BASE: break;
    default: {
      const std::string why = "the tensor is " + describe(tensor) +
                              ", expected a CPU tensor: FCCL_CUDA_INNER=gloo is set, and Gloo has no such "
                              "call for CUDA tensors. Copy "
                              "it to the CPU, or unset FCCL_CUDA_INNER so that NCCL carries it";
      if (c.collective != Collective::kNone) refuse(c, Fault::kUnsupported, why);
      throw_refusal(c, Fault::kUnsupported, why);  // a message: no other rank's collectives know of it
    }
  }
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const auto runtime = make_gpu_runtime(tensor.device());
  if (runtime != nullptr && runtime->capture_of(guard.getStream(tensor.device()).native_handle()) != 0) {
    refuse(
        c, Fault::kUnsupported,
        "the current stream is being captured into a CUDA graph, and this call goes to Gloo "
        "(FCCL_CUDA_INNER=gloo), whose work on the host no graph can hold. What fccl's kernels carry can be "
        "captured after fccl.cuda.warm_up(group); or unset FCCL_CUDA_INNER so that NCCL carries the rest");
  }
}

FcclBackend::WorkPtr FcclBackend::on_cuda(const Call& c, const at::Tensor& tensor, const InnerCall& inner) {
  // The same on all ranks, so all refuse.
  if (const std::string& why = settled_.why_no_collectives; !why.empty() && c.collective != Collective::kNone)
    refuse(c, Fault::kValue, why);
  if (const std::string& why = settled_.why_no_messages; !why.empty()) throw_refusal(c, Fault::kValue, why);
  if (cuda_by_gloo_ && cuda_factory_) check_gloo_can(c, tensor);
  ::c10d::Backend& engine = cuda(c, tensor);
  const auto gpu = gpu_engine();
  // Messages have no order among the ranks, so none can be kept: NCCL has a communicator and a stream for
  // each pair.
  const bool is_message = c.collective == Collective::kNone;
  if (gpu == nullptr || is_message) return cuda_by_gloo_ ? track(inner(engine)) : inner(engine);
  const auto call_inner = [&] { return inner(engine); };
  // Gloo knows no groups of calls: each is a work of its own, and the batch's work is all of them.
  if (cuda_by_gloo_) return track(gpu->in_turn(c.async, call_inner));
  if (!is_coalescing()) return gpu->in_turn(c.async, call_inner);
  coalesced_on_gpu_ = true;
  return gpu->coalesced(call_inner);
}

std::shared_ptr<GpuEngine> FcclBackend::gpu_engine() const {
  const std::lock_guard lock(gpu_->mutex);
  return gpu_->engine;
}

// A peer that died, say, would leave kernels waiting for the whole timeout.
void FcclBackend::fail(Gpu& gpu) {
  std::shared_ptr<GpuEngine> engine;
  {
    const std::lock_guard lock(gpu.mutex);
    engine = gpu.engine;
  }
  if (engine) engine->group().abort("the group has failed on the CPU");
}

std::string FcclBackend::why_no_gpu_kernels() const {
  const std::lock_guard lock(gpu_->mutex);
  return gpu_->why_none;
}

std::map<std::string, std::int64_t> FcclBackend::gpu_launch_counts() const {
  const auto gpu = gpu_engine();
  return gpu ? gpu->group().launch_counts() : std::map<std::string, std::int64_t>();
}

// No lock is held while the ranks set up: they wait for each other, and take Python's lock for warnings and
// for trying the links.
std::shared_ptr<GpuEngine> FcclBackend::gpu_engine(const Call& c, const at::Tensor& tensor) {
  {
    const std::lock_guard lock(gpu_->mutex);
    if (gpu_->settled) return gpu_->engine;
  }
  std::shared_ptr<GpuEngine> made;
  std::string why_not;
  const auto runtime = make_gpu_runtime(tensor.device());
  if (!settled_.why_no_kernels.empty()) {
    why_not = settled_.why_no_kernels;
    if (rank_ == 0 && settled_.somebody_wants_kernels) warn(no_kernels_because(why_not));
  } else if (carrier_->mode() != Carrier::Mode::kEngine) {
    why_not = "the ranks share no memory: " + carrier_->why_inner();
  } else {
    const c10::impl::VirtualGuardImpl cuda_guard(c10::kCUDA);
    // Memory cannot be made while the caller captures; a later call may do that.
    if (runtime->capture_of(cuda_guard.getStream(tensor.device()).native_handle()) != 0) return nullptr;
    const GpuEngine::Config config{tensor.device(), group_name_, std::chrono::milliseconds(timeout_ms_),
                                   wishes_};
    const Call setup = call(OpType::BARRIER, Collective::kGpuSetup, "fccl:gpu_setup", false, c.timeout);
    submit(setup, {}, {}, [&](Carrier& carrier, const Deadline& deadline) {
      made = GpuEngine::connect(config, carrier, deadline, why_not);
    })->wait();
    if (made == nullptr && rank_ == 0) warn(no_kernels_because(why_not));
    if (made != nullptr && rank_ == 0 && !settled_.not_unanimous.empty())
      warn("fccl: group " + group_name_ +
           " does without what only some of its ranks ask for: " + settled_.not_unanimous);
  }
  // Not after an exception: what the ranks have not agreed on is not settled.
  const std::lock_guard lock(gpu_->mutex);
  gpu_->settled = true;
  gpu_->engine = made;
  gpu_->why_none = why_not;
  return made;
}

std::string FcclBackend::no_kernels_because(const std::string& why) const {
  return "fccl: group " + group_name_ + " does not use its CUDA kernels: " + why +
         ". Its CUDA collectives go through " + cuda_inner_name() + ".";
}

// The peers have launched their kernel, or will: they must hear of it.
void FcclBackend::check_for_kernel(const Call& c, GpuEngine& gpu, const at::Tensor& input,
                                   const at::Tensor& output, std::int64_t root) const {
  const auto refuse_launch = [&](Fault fault, const std::string& why) {
    gpu.refuse();
    throw_refusal(c, fault, why);
  };
  if (c.collective == Collective::kBroadcast && (root < 0 || root >= size_)) {
    refuse_launch(Fault::kValue, "the root is rank " + std::to_string(root) + ", expected 0 to " +
                                     std::to_string(size_ - 1));
  }
  if (!is_dense_on_gpu(output, gpu.device())) {
    refuse_launch(Fault::kValue, "the output tensor is " + describe(output) +
                                     ", expected a dense (strided) one on " + gpu.device().str());
  }
  const bool writes = c.collective != Collective::kBroadcast || root != rank_;
  if (writes && at::has_internal_overlap(output) == at::MemOverlap::Yes) {
    refuse_launch(Fault::kValue, "several elements of the tensor " + describe(output) +
                                     " share one place in memory (it was expanded), expected a tensor that "
                                     "can be written; clone() it");
  }
  if (output.scalar_type() != input.scalar_type()) {
    refuse_launch(Fault::kType, "the output tensor is " + describe(output) + ", expected dtype " +
                                    type_name(input.scalar_type()) + " like the input");
  }
  if (c.collective == Collective::kAllGather && output.numel() != input.numel() * size_) {
    refuse_launch(Fault::kValue, "the output tensor is " + describe(output) + " with " +
                                     std::to_string(output.numel()) + " elements, expected " +
                                     std::to_string(input.numel() * size_) + ", " + std::to_string(size_) +
                                     " times those of the input");
  }
}

FcclBackend::WorkPtr FcclBackend::by_kernel(const Call& c, const at::Tensor& input, const at::Tensor& output,
                                            const ::c10d::ReduceOp& op, std::int64_t root) {
  if (is_coalescing()) return {};
  const auto gpu = gpu_engine(c, input);
  if (gpu == nullptr || !is_dense_on_gpu(input, gpu->device())) return {};
  Reduction reduction;
  reduction.dtype = dtype_of(input.scalar_type());
  if (c.collective == Collective::kAllReduce &&
      (!plan_reduction(input.scalar_type(), op, reduction).empty() || reduction.premultiply)) {
    return {};
  }
  cuda::GpuCall what;
  what.collective = c.collective;
  what.op = reduction.op;
  what.dtype = reduction.dtype;
  what.root = static_cast<std::int32_t>(root);
  what.count = static_cast<std::uint64_t>(input.numel()) * reduction.per_element;
  const cuda::LaunchPlan plan = gpu->plan(what);
  if (plan.algorithm == cuda::Algorithm::kInner) return {};
  check_for_kernel(c, *gpu, input, output, root);
  const bool writes = c.collective != Collective::kBroadcast || root != rank_;
  return gpu->run(plan, {what, input, output, c.type, c.title, c.async, c.timeout, writes}, rank_);
}

void FcclBackend::warm_up(const at::Device& device) {
  const Call c = call(OpType::BARRIER, Collective::kGpuSetup, "fccl:warm_up", false, ::c10d::kUnsetTimeout);
  const auto gpu = gpu_engine(c, at::empty({0}, at::device(device)));
  if (gpu == nullptr) return;
  submit(c, {}, {}, [gpu](Carrier& carrier, const Deadline& deadline) {
    gpu->warm_up(carrier, deadline);
  })->wait();
}

}  // namespace fccl::c10d_backend
