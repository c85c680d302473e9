#include "cuda/workspaces.h"

#include <atomic>
#include <exception>
#include <functional>
#include <utility>

#include "common/error.h"
#include "common/text.h"

namespace fccl::cuda {
namespace {

// What a rank says of a step.
struct Verdict {
  std::uint8_t failed = 0;
  char why[255] = {};
};

}  // namespace

std::string jointly(Peers& peers, const std::function<void()>& step) {
  Verdict own;
  try {
    step();
  } catch (const std::exception& error) {
    own.failed = 1;
    copy_text(error.what(), own.why);
  }
  const std::vector<Verdict> verdicts = gather(peers, own);
  for (std::size_t rank = 0; rank < verdicts.size(); ++rank) {
    Verdict verdict = verdicts[rank];
    if (verdict.failed == 0) continue;
    make_printable(verdict.why);
    return "rank " + std::to_string(rank) + ": " + verdict.why;
  }
  return {};
}

Workspaces::Workspaces(std::shared_ptr<Runtime> runtime, int rank, int world, std::uint64_t half_bytes)
    : runtime_(std::move(runtime)),
      rank_(rank),
      half_bytes_(half_bytes),
      exports_(static_cast<std::size_t>(world)),
      workspaces_(static_cast<std::size_t>(world)) {}

Workspaces::~Workspaces() { close(nullptr); }

std::unique_ptr<Workspaces> Workspaces::connect(std::shared_ptr<Runtime> runtime, Peers& peers,
                                                std::uint64_t half_bytes, std::string& why_not) {
  const auto own_rank = static_cast<std::size_t>(peers.rank());
  std::unique_ptr<Workspaces> made(
      new Workspaces(std::move(runtime), peers.rank(), peers.size(), half_bytes));
  Runtime& gpu = *made->runtime_;
  why_not = jointly(peers, [&] {
    made->status_ = static_cast<Status*>(gpu.allocate_host(sizeof(Status)));
    made->own_ = gpu.allocate_shared(workspace_bytes(half_bytes));
    made->workspaces_[own_rank] = made->own_.data;
    const std::uint64_t first_generation = 1;
    gpu.poke(reinterpret_cast<std::uint32_t*>(made->own_.data + offsetof(Control, generation)),
             static_cast<std::uint32_t>(first_generation));
  });
  if (!why_not.empty()) {
    made->close(&peers);
    return nullptr;
  }
  made->exports_ = gather(peers, made->own_.how);
  std::vector<Descriptor> descriptors;
  const bool by_descriptor = [&] {
    for (const Export& each : made->exports_) {
      if (each.kind != Export::Kind::kDescriptor) return false;
    }
    return true;
  }();
  if (by_descriptor) descriptors = peers.exchange(made->own_.descriptor);
  why_not = jointly(peers, [&] {
    for (std::size_t rank = 0; rank < made->exports_.size(); ++rank) {
      const Export& how = made->exports_[rank];
      if (how.kind != made->own_.how.kind || how.bytes != made->own_.how.bytes) {
        throw Error(ErrorKind::kSystem,
                    "rank " + std::to_string(rank) +
                        " exports its workspace in another way than this rank, or another size");
      }
      if (rank == own_rank) continue;
      const Descriptor none;
      made->workspaces_[rank] = gpu.map_peer(how, by_descriptor ? descriptors[rank] : none);
    }
  });
  if (why_not.empty()) return made;
  made->close(&peers);
  return nullptr;
}

Session Workspaces::session(std::uint64_t description, std::uint64_t timeout_ns) const {
  Session session{};
  for (std::size_t rank = 0; rank < workspaces_.size(); ++rank) session.workspace[rank] = workspaces_[rank];
  session.half_bytes = half_bytes_;
  session.description = description;
  session.timeout_ns = timeout_ns;
  session.status = status_;
  session.rank = rank_;
  session.world = static_cast<std::int32_t>(workspaces_.size());
  return session;
}

Status Workspaces::status() const {
  Status status{};
  // The kernel releases `failure` after the rest.
  status.failure = std::atomic_ref<std::uint32_t>(status_->failure).load(std::memory_order_acquire);
  if (status.failure == 0) return status;
  status.peer = status_->peer;
  status.generation = status_->generation;
  status.mine = status_->mine;
  status.theirs = status_->theirs;
  status.timeout_ns = status_->timeout_ns;
  return status;
}

void Workspaces::abort() noexcept {
  for (std::size_t rank = 0; rank < workspaces_.size(); ++rank) abort(rank);
}

void Workspaces::abort_own() noexcept { abort(static_cast<std::size_t>(rank_)); }

void Workspaces::abort(std::size_t rank) noexcept {
  std::byte* const workspace = workspaces_[rank];
  if (workspace == nullptr) return;
  try {
    runtime_->poke(reinterpret_cast<std::uint32_t*>(workspace + offsetof(Control, abort)),
                   static_cast<std::uint32_t>(rank_) + 1);
  } catch (const Error&) {
    // A device that takes no more words has no kernels that wait either; the others must be told all the
    // same.
  }
}

void Workspaces::unmap() noexcept {
  for (std::size_t rank = 0; rank < workspaces_.size(); ++rank) {
    if (static_cast<int>(rank) == rank_) continue;
    if (std::byte* const workspace = std::exchange(workspaces_[rank], nullptr))
      runtime_->unmap_peer(exports_[rank], workspace);
  }
}

void Workspaces::close(Peers* peers) noexcept {
  bool met = false;
  if (!kept_) unmap();
  if (peers != nullptr) {
    try {
      peers->barrier();
      met = true;
    } catch (const std::exception&) {
      // The peers are gone, or the group is.
    }
  }
  if (kept_) return;
  if (own_.data != nullptr && (met || own_.how.kind == Export::Kind::kDescriptor))
    runtime_->free_shared(own_);
  own_ = {};
  workspaces_.assign(workspaces_.size(), nullptr);
  if (void* const status = std::exchange(status_, nullptr)) runtime_->free_host(status);
}

}  // namespace fccl::cuda
