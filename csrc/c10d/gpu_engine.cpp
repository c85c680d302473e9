#include "c10d/gpu_engine.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "c10d/errors.h"
#include "c10d/gpu_peers.h"
#include "c10d/gpu_work.h"
#include "c10d/tensors.h"
#include "common/text.h"

namespace fccl::c10d_backend {
namespace {

bool is_on(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, "1") == 0;
}

GpuProbe& probe_of_process() {
  static auto* probe = new GpuProbe();
  return *probe;
}

// Names the GPUs in the order of their ranks, what drives them, and what runs on them.
std::string key_of(std::span<const cuda::RankTerms> ranks) {
  std::string key = "protocol " + std::to_string(cuda::kProtocolVersion);
  for (const cuda::RankTerms& rank : ranks) {
    key += "; ";
    for (const unsigned char byte : rank.device.uuid) {
      constexpr const char* kDigits = "0123456789abcdef";
      key += kDigits[byte / 16];
      key += kDigits[byte % 16];
    }
    key += " driver " + std::to_string(rank.device.driver);
  }
  return key;
}

// What a rank brings to a trial. Fixed layout.
struct TrialTerms {
  std::uint8_t wanted = 0;
  std::uint8_t proven = 0;
  char path[254] = {};   // where the children meet: rank 0's
  char error[256] = {};  // why this rank cannot take part
};

// Throws what `peers` throws, and nothing else: a rank that left before the others would leave them waiting.
std::string try_links(const GpuProbe& probe, c10::Device device, cuda::Peers& peers,
                      std::span<const cuda::RankTerms> ranks) {
  const std::string key = key_of(ranks);
  TrialTerms own;
  std::string path;
  try {
    own.wanted = probe.is_wanted() ? 1 : 0;
    own.proven = probe.is_proven(key) ? 1 : 0;
    if (peers.rank() == 0) path = probe.make_rendezvous();
    copy_text(path, own.path);
  } catch (const std::exception& error) {
    copy_text(error.what(), own.error);
  }
  std::vector<TrialTerms> all = cuda::gather(peers, own);
  bool needed = false;
  std::string why;
  for (TrialTerms& each : all) {
    make_printable(each.path);
    make_printable(each.error);
    needed = needed || (each.wanted != 0 && each.proven == 0);
    if (why.empty() && each.error[0] != 0) why = std::string("the links could not be tried: ") + each.error;
  }
  try {
    if (needed && why.empty()) why = probe.run(key, peers.rank(), peers.size(), device.index(), all[0].path);
  } catch (const std::exception& error) {
    why = std::string("the links could not be tried: ") + error.what();
  }
  peers.barrier();  // nobody's child needs the place any more
  try {
    if (!path.empty()) probe.remove_rendezvous(path);
  } catch (const std::exception&) {
    // An empty folder is left behind.
  }
  return why;
}

}  // namespace

cuda::Wishes wishes_of_this_process(cuda::InnerEngine inner) {
  cuda::Wishes wishes;
  wishes.inner = inner;
  wishes.has_kernels = built_with_kernels();
  // Until they have been measured on GPUs, fccl's own kernels are used by those who ask for them.
  wishes.wants_kernels = is_on("FCCL_CUDA_KERNELS");
  wishes.deterministic = is_on("FCCL_CUDA_DETERMINISTIC");
  wishes.float32_accumulation = is_on("FCCL_CUDA_FLOAT32_ACCUMULATION");
  wishes.may_share_gpu = is_on("FCCL_CUDA_SHARED_GPU");
  return wishes;
}

void set_gpu_probe(GpuProbe probe) { probe_of_process() = std::move(probe); }

std::shared_ptr<GpuEngine> GpuEngine::connect(const Config& config, Carrier& carrier,
                                              const Deadline& deadline, std::string& why_not) {
  CarrierPeers peers(carrier, deadline);
  peers.barrier();
  cuda::GpuGroupConfig gpu;
  gpu.runtime = make_gpu_runtime(config.device);
  gpu.name = config.group_name;
  gpu.timeout = config.timeout;
  gpu.deterministic = config.wishes.deterministic;
  gpu.float32_accumulation = config.wishes.float32_accumulation;
  gpu.may_share_gpu = config.wishes.may_share_gpu;
  if (const GpuProbe& probe = probe_of_process(); probe.run) {
    gpu.prove = [&](const cuda::Terms&, std::span<const cuda::RankTerms> ranks) {
      return try_links(probe, config.device, peers, ranks);
    };
  }
  auto group = cuda::GpuGroup::connect(std::move(gpu), peers, why_not);
  if (group == nullptr) return nullptr;
  auto engine = std::make_shared<GpuEngine>(config.device, std::move(group));
  engine->watch_ = std::make_unique<PeerWatch>(
      [cpu = carrier.group()] { return cpu->lost_rank(); },
      [gpu = engine->group_.get()](const std::string& why) { gpu->end_waits(why); });
  return engine;
}

GpuEngine::GpuEngine(c10::Device device, std::unique_ptr<cuda::GpuGroup> group)
    : device_(device),
      group_(std::move(group)),
      side_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
      marker_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

void GpuEngine::stop_watching() noexcept {
  const std::lock_guard lock(watch_mutex_);
  watch_.reset();
}

void GpuEngine::warm_up(Carrier& carrier, const Deadline& deadline) {
  CarrierPeers peers(carrier, deadline);
  peers.barrier();
  group_->warm_up(peers);
}

c10::Stream GpuEngine::current() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

c10::Stream GpuEngine::side_stream() {
  c10::Event before(device_.type());
  before.record(current());
  before.block(side_);
  return side_;
}

cuda::LaunchPlan GpuEngine::plan(const cuda::GpuCall& call) const {
  // Settled on the caller's stream: whether that is being captured holds for the other one too.
  return group_->plan(call, current().native_handle());
}

GpuEngine::WorkPtr GpuEngine::run(const cuda::LaunchPlan& plan, const Operation& operation, int rank) {
  const c10::Stream stream = operation.async ? side_stream() : current();
  const c10::StreamGuard guard(stream);
  // Copies are made on this stream, and by its allocator, which gives their memory to nobody before the
  // stream has come to the end of what uses it.
  at::Tensor input;
  at::Tensor output;
  try {
    input = readable(operation.input);
    output = operation.output.is_same(operation.input) ? input : writable(operation.output);
  } catch (...) {  // no memory for a copy: the peers launch theirs all the same
    refuse();
    throw;
  }
  try {
    group_->launch(plan, operation.call, input.const_data_ptr(), output.mutable_data_ptr(),
                   stream.native_handle(), operation.timeout);
  } catch (const Error& error) {
    throw_as_torch(error);
  }
  if (operation.writes) put_back(output, operation.output);
  return c10::make_intrusive<GpuWork>(rank, operation.type, operation.title, shared_from_this(), stream,
                                      std::vector<at::Tensor>{operation.output},
                                      std::vector<at::Tensor>{operation.input, operation.output});
}

void GpuEngine::refuse() noexcept {
  try {
    const c10::Stream stream = side_stream();
    const c10::StreamGuard guard(stream);
    group_->refuse(stream.native_handle());
  } catch (const std::exception&) {
    // The group has failed, which the peers know; this call has an error of its own.
  }
}

GpuEngine::WorkPtr GpuEngine::in_turn(bool async, const std::function<WorkPtr()>& inner) {
  if (const auto failure = group_->failure()) throw_as_torch(*failure);
  if (!async) {
    group_->enter_inner(current().native_handle());
    WorkPtr work = inner();
    group_->leave_inner(current().native_handle());
    return work;
  }
  // The inner engine's stream waits for the one that is current at the call. That is not the caller's, or the
  // caller's next kernels would wait for the group's operation before.
  const c10::StreamGuard guard(side_stream());
  group_->enter_inner(current().native_handle());
  WorkPtr work = inner();
  leave_asynchronous(work.get());
  return work;
}

// The inner engine's stream is made to wait for the current one by each coalesced call, and puts all of them
// on it at the end.
GpuEngine::WorkPtr GpuEngine::coalesced(const std::function<WorkPtr()>& inner) {
  group_->enter_inner(current().native_handle());
  return inner();
}

void GpuEngine::end_coalesced(::c10d::Work* work) {
  leave_asynchronous(work);
  if (const auto failure = group_->failure()) throw_as_torch(*failure);
}

// NCCL's Future is complete as soon as it is made: to wait for it makes the current stream wait, not the
// host. It holds the outputs, so it is not kept. Gloo's is complete when the host has done the work. That is
// not waited for: its only kernels are copies, which wait for no peer on the device, so whatever comes next
// may overtake them.
void GpuEngine::leave_asynchronous(::c10d::Work* work) {
  const auto future = work != nullptr ? work->getFuture() : nullptr;
  if (!future || !future->completed() || future->hasError()) {
    group_->leave_inner(current().native_handle());
    return;
  }
  const c10::StreamGuard guard(marker_);
  future->wait();
  group_->leave_inner(marker_.native_handle());
}

}  // namespace fccl::c10d_backend
