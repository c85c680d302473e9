#include "c10d/backend.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <set>
#include <utility>

#include "c10d/arena_tensors.h"
#include "c10d/completion.h"
#include "c10d/errors.h"
#include "c10d/gpu_engine.h"
#include "c10d/process.h"
#include "cpu/arena.h"

namespace fccl::c10d_backend {
namespace {

// How long shutdown() lets pending collectives finish. Peers that are about to make theirs get the
// result; for one that never will, nobody waits longer.
constexpr auto kDrain = std::chrono::seconds(3);

struct Registry {
  std::mutex mutex;
  std::vector<c10::weak_intrusive_ptr<FcclBackend>> backends;
};

Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

// A group of the same name may have used the same store before: torchrun keeps its store when all
// ranks destroy their groups and initialise again. Keys of the earlier incarnation are still there,
// so each has a prefix of its own. Invariant: all ranks of a group construct its backend equally
// often, so their counters, kept per rank, agree without any exchange.
c10::intrusive_ptr<::c10d::Store> incarnation_store(const FcclBackend::Config& config) {
  if (config.size == 1) return config.store;
  const std::int64_t number = config.store->add("fccl/incarnation/" + std::to_string(config.rank), 1);
  return c10::make_intrusive<::c10d::PrefixStore>("fccl/" + std::to_string(number), config.store);
}

}  // namespace

std::uint64_t FcclBackend::fork_generation_now() noexcept { return fork_generation(); }

c10::intrusive_ptr<FcclBackend> FcclBackend::create(Config config) {
  auto backend = c10::make_intrusive<FcclBackend>(std::move(config));
  std::lock_guard lock(registry().mutex);
  auto& all = registry().backends;
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& weak) { return weak.expired(); }),
            all.end());
  all.emplace_back(backend);
  return backend;
}

void FcclBackend::shutdown_all(const std::string& why) noexcept {
  const GilRelease unlocked;
  std::vector<c10::intrusive_ptr<FcclBackend>> alive;
  {
    std::lock_guard lock(registry().mutex);
    for (const auto& weak : registry().backends) {
      if (auto backend = weak.lock()) alive.push_back(std::move(backend));
    }
    registry().backends.clear();
  }
  for (const auto& backend : alive) {
    try {
      backend->shut_down(why);
    } catch (...) {
      // The process is ending; there is nobody left to tell.
    }
  }
  drain_completions(kDrain);
}

FcclBackend::FcclBackend(Config config)
    : ::c10d::Backend(config.rank, config.size),
      timeout_ms_(config.timeout.count()),
      group_name_(config.group_name),
      global_ranks_(config.global_ranks),
      store_(incarnation_store(config)),
      cuda_factory_(config.cuda_factory),
      cuda_by_gloo_(config.cuda_by_gloo),
      wishes_(wishes_of_this_process(!config.cuda_factory  ? cuda::InnerEngine::kNone
                                     : config.cuda_by_gloo ? cuda::InnerEngine::kGloo
                                                           : cuda::InnerEngine::kNccl)),
      executor_(std::make_shared<Executor>()) {
  TORCH_CHECK_VALUE(config.size >= 1 && config.rank >= 0 && config.rank < config.size, "fccl: rank ",
                    config.rank, " in a group of ", config.size,
                    ", expected a rank from 0 to the size less one");
  // Not left for the first use: a group's first operation may be a send between two of its ranks.
  try {
    carrier_ = std::make_shared<Carrier>(
        config.rank, config.size, group_name_, store_,
        [make = config.cpu_factory](const auto& store) { return make(inner_store(store, "cpu")); },
        config.timeout,
        [hooks = failure_hooks_, gpu = gpu_] {
          fail(*gpu);
          hooks->run();
        },
        wishes_.pack());
    settled_ = cuda::settle_wishes(carrier_->words());
  } catch (const Error& error) {
    throw_as_torch(error);
  }
}

FcclBackend::~FcclBackend() { release_resources(); }

// The last reference is gone. Where a weak one is left (the registry's), c10 calls this and destroys the
// object later, when nobody may count on threads and connections to be gone only then.
void FcclBackend::release_resources() {
  if (!carrier_) return;
  if (fork_generation() != born_in_) {
    // A forked child has neither the threads nor the connections: leave everything as it lies.
    carrier_->forget();
    (void)cuda_inner_.release();
    new std::shared_ptr<GpuEngine>(gpu_engine());
    (void)store_.release();
    new std::shared_ptr<Carrier>(std::move(carrier_));
    new std::shared_ptr<Executor>(std::move(executor_));
    return;
  }
  GilRelease unlocked;
  try {
    shutdown();
  } catch (...) {
  }
  carrier_.reset();
  executor_.reset();
  {
    const std::lock_guard lock(gpu_->mutex);
    gpu_->engine.reset();
  }
  cuda_inner_.reset();
}

std::string FcclBackend::engine() const {
  switch (carrier_->mode()) {
    case Carrier::Mode::kEngine: return "shared-memory";
    case Carrier::Mode::kInner:
    case Carrier::Mode::kLocal: break;
  }
  return "inner";
}

std::uint64_t FcclBackend::zero_copy_count() const {
  return carrier_->mode() == Carrier::Mode::kEngine ? carrier_->group()->zero_copy_count() : 0;
}

std::string FcclBackend::why_no_zero_copy() const {
  switch (carrier_->mode()) {
    case Carrier::Mode::kEngine: return carrier_->group()->why_no_zero_copy();
    default: return carrier_->why_inner();
  }
}

// -1 is the CPU, or a CUDA device without a number: for that one the inner NCCL is asked by number later.
bool FcclBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  if (device >= 0) {
    std::lock_guard lock(cuda_mutex_);
    return cuda_inner_ && cuda_inner_->supportsTensorAlloc(device);
  }
  return size_ > 1 && cpu::Arena::of_process() != nullptr && why_no_zero_copy().empty();
}

at::Tensor FcclBackend::allocateTensor(long size, at::TensorOptions options) {
  if (options.device().is_cuda()) {
    std::lock_guard lock(cuda_mutex_);
    TORCH_CHECK(cuda_inner_, "fccl allocateTensor on rank ", rank_,
                ": the group has no NCCL yet; make a "
                "collective on a CUDA tensor first");
    return cuda_inner_->allocateTensor(size, options);
  }
  TORCH_CHECK_VALUE(options.device().is_cpu() && size >= 0, "fccl allocateTensor on rank ", rank_, ": ", size,
                    " elements on ", options.device(), ", expected at least none on the CPU");
  return arena_empty({size}, c10::typeMetaToScalarType(options.dtype()), "group " + group_name_);
}

FcclBackend::Call FcclBackend::call(::c10d::OpType type, Collective collective, const char* title, bool async,
                                    std::chrono::milliseconds timeout) const {
  // Before anything that may be locked: the parent may have forked in the middle of a collective.
  if (fork_generation() != born_in_) {
    C10_THROW_ERROR(DistBackendError,
                    std::string(title) + " on rank " + std::to_string(rank_) +
                        ": this process was forked after the process group was made, and threads, "
                        "memory and connections stay with the parent; call init_process_group() "
                        "in the child");
  }
  // A timeout not given per call arrives as -1 (or 0): the group's holds.
  if (timeout <= std::chrono::milliseconds::zero()) timeout = std::chrono::milliseconds(timeout_ms_);
  return {type, collective, title, async, timeout};
}

c10::intrusive_ptr<FcclBackend::Options> FcclBackend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>("fccl", std::chrono::milliseconds(timeout_ms_));
  options->group_name = group_name_;
  options->global_ranks_in_group = global_ranks_;
  return options;
}

void FcclBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ms_ = timeout.count();
  if (carrier_->inner()) carrier_->inner()->setTimeout(timeout);
  std::lock_guard lock(cuda_mutex_);
  if (cuda_inner_) cuda_inner_->setTimeout(timeout);
}

::c10d::ErrorType FcclBackend::getError() {
  auto failure = carrier_->group() != nullptr ? carrier_->group()->failure() : std::nullopt;
  if (const auto gpu = gpu_engine(); gpu && !failure) failure = gpu->group().failure();
  if (!failure) return ::c10d::ErrorType::SUCCESS;
  switch (failure->kind()) {
    case ErrorKind::kTimeout: return ::c10d::ErrorType::TIMEOUT;
    case ErrorKind::kPeerDied:
    case ErrorKind::kPeerLeft:
    case ErrorKind::kPeerFailed: return ::c10d::ErrorType::REMOTE_ERROR;
    default: return ::c10d::ErrorType::COMM_ERROR;
  }
}

void FcclBackend::abort() {
  if (carrier_->group() != nullptr) {
    carrier_->group()->abort("abort() was called on rank " + std::to_string(rank_) + " of group " +
                             group_name_);
  } else if (!aborted_.exchange(true)) {
    failure_hooks_->run();  // a group of one rank
  }
  if (const auto gpu = gpu_engine()) gpu->group().abort("abort() was called there");
  std::lock_guard lock(cuda_mutex_);
  if (cuda_inner_) cuda_inner_->abort();
}

#ifdef C10D_BACKEND_HAS_HOOKS
void FcclBackend::registerAbortHook(std::int64_t id, ::c10d::AbortHook hook) {
  failure_hooks_->add(id, std::move(hook));
}

void FcclBackend::unregisterAbortHook(std::int64_t id) { failure_hooks_->remove(id); }
#endif

void FcclBackend::shutdown() { shut_down("it was destroyed there"); }

void FcclBackend::shut_down(const std::string& why) {
  if (fork_generation() != born_in_ || shut_down_.exchange(true)) return;
  GilRelease unlocked;
  if (const auto gpu = gpu_engine()) gpu->stop_watching();
  const auto grace = std::min<std::chrono::milliseconds>(kDrain, std::chrono::milliseconds(timeout_ms_));
  const bool idle = executor_->stop(grace, [this, &why] {
    if (carrier_->group() != nullptr) {
      carrier_->group()->abort("rank " + std::to_string(rank_) + " left group " + group_name_ +
                               " while collectives were pending: " + why);
    }
  });
  if (cpu::Group* group = carrier_->group()) idle ? group->leave(why) : group->end_messages(why);
  if (carrier_->inner()) carrier_->inner()->shutdown();
  if (const auto gpu = gpu_engine()) gpu->group().close(nullptr);
  std::lock_guard lock(cuda_mutex_);
  if (cuda_inner_) cuda_inner_->shutdown();
}

}  // namespace fccl::c10d_backend
