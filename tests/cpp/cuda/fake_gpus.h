// GPUs without a GPU: a Runtime that records what it is asked and runs kernels on fibres, and Peers that are
// threads of this process.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "cuda/all_reduce.h"
#include "cuda/fake_buckets.h"
#include "cuda/gather_broadcast.h"
#include "cuda/gpu_group.h"
#include "cuda/launcher.h"

namespace fccl::cuda::host {

// ---- Peers ----

struct Meetings {
  explicit Meetings(int ranks)
      : barrier(ranks), bytes(static_cast<std::size_t>(ranks)), fds(bytes.size(), -1) {}
  std::barrier<> barrier;
  std::vector<std::vector<std::byte>> bytes;
  std::vector<int> fds;
};

class ThreadPeers final : public Peers {
 public:
  ThreadPeers(std::shared_ptr<Meetings> meetings, int rank, int size)
      : meetings_(std::move(meetings)), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::byte> all_gather(std::span<const std::byte> own) override {
    meetings_->bytes[index()] = {own.begin(), own.end()};
    barrier();
    std::vector<std::byte> all;
    for (const auto& each : meetings_->bytes) all.insert(all.end(), each.begin(), each.end());
    barrier();
    return all;
  }
  std::vector<Descriptor> exchange(const Descriptor& own) override {
    meetings_->fds[index()] = own.get();
    barrier();
    std::vector<Descriptor> all(meetings_->fds.size());
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (r != index()) all[r] = Descriptor(::dup(meetings_->fds[r]));
    }
    barrier();
    return all;
  }
  void barrier() override { meetings_->barrier.arrive_and_wait(); }

 private:
  std::size_t index() const { return static_cast<std::size_t>(rank_); }
  const std::shared_ptr<Meetings> meetings_;
  const int rank_;
  const int size_;
};

// ---- Runtime ----

// Which member fails, for tests of the way out.
enum class Fails { kNothing, kFacts, kLink, kAllocate, kMap, kLoad, kLaunch, kMemory };

class FakeRuntime final : public Runtime {
 public:
  explicit FakeRuntime(int rank) : rank_(rank) {}
  ~FakeRuntime() override = default;

  // What a test sets.
  Fails fails = Fails::kNothing;
  Link link = Link::kNvlink;
  Export::Kind kind = Export::Kind::kDescriptor;
  int gpu = -1;                                    // which GPU this rank has; -1: one of its own
  std::map<StreamHandle, std::uint64_t> captures;  // streams that are being captured
  bool executes = true;
  std::atomic<bool> busy{false};  // the device is not done with what it was given
  bool hangs = false;             // and an abort does not help
  std::function<void()> at_launch;

  // What it sees.
  std::vector<std::string> log;  // of streams, events and launches
  int allocations = 0;           // that are not free yet
  int mappings = 0;
  int host_allocations = 0;
  int events = 0;
  std::atomic<int> pokes{0};
  Session last_session{};
  BucketLaunch last_pass{};

  DeviceFacts facts() override {
    fail_if(Fails::kFacts, "no device");
    DeviceFacts facts;
    facts.uuid[0] = static_cast<unsigned char>(gpu < 0 ? rank_ : gpu);
    facts.uuid[1] = 1;
    facts.architecture = 90;
    facts.sm_count = 4 + rank_;  // few, as every block of the grid becomes fibres
    return facts;
  }
  Link link_to(const std::array<unsigned char, 16>& uuid) override {
    return fails == Fails::kLink && uuid[0] == 0 ? Link::kNone : link;
  }
  Shared allocate_shared(std::size_t bytes) override {
    fail_if(Fails::kAllocate, "no memory on the device");
    Shared shared;
    shared.how.kind = kind;
    shared.how.bytes = bytes;
    shared.descriptor = Descriptor(::memfd_create("gpu", 0));
    if (::ftruncate(shared.descriptor.get(), static_cast<off_t>(bytes)) != 0) throw std::bad_alloc();
    shared.data = map(shared.descriptor.get(), bytes);
    if (kind == Export::Kind::kIpcHandle) {
      std::memcpy(shared.how.ipc_handle.data(), &shared.data, sizeof(shared.data));
      shared.descriptor.reset();
    }
    ++allocations;
    return shared;
  }
  void free_shared(const Shared& memory) noexcept override {
    ::munmap(memory.data, memory.how.bytes);
    --allocations;
  }
  std::byte* map_peer(const Export& how, const Descriptor& descriptor) override {
    fail_if(Fails::kMap, "peer access is not supported");
    std::byte* data = nullptr;
    if (how.kind == Export::Kind::kIpcHandle) {
      std::memcpy(&data, how.ipc_handle.data(), sizeof(data));
    } else {
      data = map(descriptor.get(), how.bytes);
    }
    ++mappings;
    return data;
  }
  void unmap_peer(const Export& how, std::byte* data) noexcept override {
    if (how.kind == Export::Kind::kDescriptor) ::munmap(data, how.bytes);
    --mappings;
  }
  void* allocate_host(std::size_t bytes) override {
    ++host_allocations;
    return zeroed(bytes);
  }
  void free_host(void* data) noexcept override {
    ::operator delete(data, std::align_val_t{64});
    --host_allocations;
  }

  EventHandle make_event() override {
    ++events;
    return reinterpret_cast<EventHandle>(static_cast<std::uintptr_t>(++event_names_));
  }
  void destroy_event(EventHandle) noexcept override { --events; }
  void record(EventHandle event, StreamHandle stream) override {
    log.push_back("record " + name(event) + " on " + name(stream));
  }
  void wait(StreamHandle stream, EventHandle event) override {
    log.push_back(name(stream) + " waits for " + name(event));
  }
  bool done(EventHandle) noexcept override { return !busy; }
  std::uint64_t capture_of(StreamHandle stream) override {
    const auto found = captures.find(stream);
    return found == captures.end() ? 0 : found->second;
  }

  void launch(const LaunchPlan& plan, const void* args, StreamHandle stream) override {
    log.push_back(std::string(name_of(plan.algorithm)) + " on " + name(stream));
    std::memcpy(&last_session, args, sizeof(last_session));  // the first member of all Args
    if (fails == Fails::kMemory) throw std::bad_alloc();     // no Error of fccl's
    fail_if(Fails::kLaunch, "no room");
    if (at_launch) at_launch();
    if (!executes) return;
    switch (plan.element) {
      case DType::kFloat32: run<Float32>(plan, args); break;
      case DType::kInt64: run<Int64>(plan, args); break;
      case DType::kInt32: run<Int32>(plan, args); break;
      case DType::kBFloat16: run<BFloat16>(plan, args); break;
      default: throw Error(ErrorKind::kSystem, "this fake has no such kernel");
    }
  }
  void launch(const BucketLaunch& pass, const void* args, StreamHandle stream) override {
    last_pass = pass;
    log.push_back("bucket kernel " + std::to_string(static_cast<int>(pass.kernel)) + " on " + name(stream));
    fail_if(Fails::kLaunch, "no room");
    run_bucket_kernel(pass, args, 2);
  }
  void load_kernels() override { fail_if(Fails::kLoad, "no such kernel image"); }
  void poke(std::uint32_t* at, std::uint32_t value) override {
    ++pokes;
    busy = hangs;
    std::atomic_ref<std::uint32_t>(*at).store(value, std::memory_order_relaxed);
  }

 private:
  static std::byte* map(int fd, std::size_t bytes) {
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(at);
  }
  static std::string name(const void* handle) {
    return std::to_string(reinterpret_cast<std::uintptr_t>(handle));
  }
  static void* zeroed(std::size_t bytes) {
    void* const data = ::operator new(bytes, std::align_val_t{64});
    return std::memset(data, 0, bytes);
  }
  void fail_if(Fails when, const char* what) const {
    if (fails == when) throw Error(ErrorKind::kSystem, what);
  }

  template <class Element>
  void run(const LaunchPlan& plan, const void* args) {
    switch (plan.algorithm) {
      case Algorithm::kOneShotAllReduce: return run_kernel<OneShotAllReduce<Element>>(plan, args);
      case Algorithm::kTwoShotAllReduce: return run_kernel<TwoShotAllReduce<Element>>(plan, args);
      case Algorithm::kOneShotAllGather: return run_kernel<OneShotAllGather<Element>>(plan, args);
      case Algorithm::kBroadcast: return run_kernel<Broadcast<Element>>(plan, args);
      case Algorithm::kInner: throw Error(ErrorKind::kSystem, "no kernel");
    }
  }
  template <class Kernel>
  static void run_kernel(const LaunchPlan& plan, const void* args) {
    Launcher launcher(1);
    launcher.add<Kernel>(0, plan.blocks, plan.threads, *static_cast<const typename Kernel::Args*>(args));
    launcher.run();  // a trap shows in the status
  }

  const int rank_;
  int event_names_ = 100;
};

// Runs `body(rank)` on a thread for each rank.
inline void on_all_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace fccl::cuda::host
