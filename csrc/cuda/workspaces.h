// The workspaces of a group's GPUs, each mapped by all: how they come to be, and how they end.
//
// Every step is taken by all ranks together, and a rank on which it failed says so to the others, so that
// either all have a set of workspaces or none has.
//
// The end has an order: all ranks stop using the peers' memory, unmap it and meet; then each frees its own. A
// rank whose peers do not come to that meeting keeps its memory if it was exported by an IPC handle, since a
// peer may still have it mapped; behind a descriptor the driver counts who has.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/peers.h"
#include "cuda/runtime.h"
#include "cuda/workspace.h"

namespace fccl::cuda {

// Takes a step that may fail on some ranks. Returns why it did, naming the first such rank; empty if it went
// well everywhere. Errors of `peers` itself pass through.
std::string jointly(Peers& peers, const std::function<void()>& step);

class Workspaces {
 public:
  // All ranks together. Null on all if any rank could not; `why_not` names it.
  static std::unique_ptr<Workspaces> connect(std::shared_ptr<Runtime> runtime, Peers& peers,
                                             std::uint64_t half_bytes, std::string& why_not);
  ~Workspaces();  // as close(nullptr), unless it was closed
  Workspaces(const Workspaces&) = delete;
  Workspaces& operator=(const Workspaces&) = delete;

  // `description`: the call's word.
  Session session(std::uint64_t description, std::uint64_t timeout_ns) const;
  // What this rank's kernels have written there, if they failed.
  Status status() const;
  // Ends the kernels that wait here and on the peers; all later ones fail.
  void abort() noexcept;
  // The same for this rank's kernels only.
  void abort_own() noexcept;

  // When no kernel uses them any more: unmaps, meets the peers and frees. Without peers, or if they do not
  // come: as above.
  void close(Peers* peers) noexcept;
  // Never to be freed: a graph has it, or on another rank its counterpart. (A collective is captured on all
  // ranks or on none.)
  void keep() noexcept { kept_ = true; }

 private:
  Workspaces(std::shared_ptr<Runtime> runtime, int rank, int world, std::uint64_t half_bytes);
  void abort(std::size_t rank) noexcept;
  void unmap() noexcept;

  const std::shared_ptr<Runtime> runtime_;
  const int rank_;
  const std::uint64_t half_bytes_;
  Runtime::Shared own_;
  Status* status_ = nullptr;
  std::vector<Export> exports_;         // by rank
  std::vector<std::byte*> workspaces_;  // by rank; null: not mapped
  bool kept_ = false;
};

}  // namespace fccl::cuda
