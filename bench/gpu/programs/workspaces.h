// The workspaces of ranks that are streams of one process: all in the memory of one machine, which every rank
// reaches at the same address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/workspace.h"
#include "machine.h"

namespace fccl::gpu_check {

class RankWorkspaces {
 public:
  // `first_generation`: the number of the first launch.
  RankWorkspaces(Machine& machine, int world, std::size_t half_bytes, std::uint64_t first_generation,
                 double timeout_s)
      : half_bytes_(half_bytes), timeout_ns_(static_cast<std::uint64_t>(timeout_s * 1e9)) {
    for (int rank = 0; rank < world; ++rank) {
      workspaces_.push_back(machine.allocate(cuda::workspace_bytes(half_bytes)));
      machine.copy_in(workspaces_.back() + offsetof(cuda::Control, generation), &first_generation,
                      sizeof(first_generation));
      statuses_.push_back(static_cast<cuda::Status*>(machine.allocate_host(sizeof(cuda::Status))));
    }
  }

  int world() const { return static_cast<int>(workspaces_.size()); }
  std::size_t half_bytes() const { return half_bytes_; }

  cuda::Session session(int rank, std::uint64_t description) const {
    cuda::Session session{};
    for (std::size_t peer = 0; peer < workspaces_.size(); ++peer) session.workspace[peer] = workspaces_[peer];
    session.half_bytes = half_bytes_;
    session.description = description;
    session.timeout_ns = timeout_ns_;
    session.status = statuses_[static_cast<std::size_t>(rank)];
    session.rank = rank;
    session.world = world();
    return session;
  }

  // Which ranks' kernels gave up, once the machine has finished; empty if none did.
  std::string failure() const {
    for (std::size_t rank = 0; rank < statuses_.size(); ++rank) {
      const cuda::Status& status = *statuses_[rank];
      if (status.failure == 0) continue;
      const char* const why = status.failure == static_cast<std::uint32_t>(cuda::Failure::kExpired)
                                  ? "waited in vain for rank "
                                  : "was told to give up, or found another call, by rank ";
      return "rank " + std::to_string(rank) + " " + why + std::to_string(status.peer) + " in launch " +
             std::to_string(status.generation);
    }
    return "";
  }

 private:
  const std::size_t half_bytes_;
  const std::uint64_t timeout_ns_;
  std::vector<std::byte*> workspaces_;
  std::vector<cuda::Status*> statuses_;
};

}  // namespace fccl::gpu_check
