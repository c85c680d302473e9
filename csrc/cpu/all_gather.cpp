// all_gather, one-shot and staged, with equal or unequal contributions; without copies: zero_copy.h.
//
// One-shot (every contribution is small): each rank writes its own into its one-shot slot, arrives, and
// copies everybody's. Parity as in all_reduce (I4).
//
// Staged: each rank copies its contribution chunk by chunk into its staging slots while it copies the
// peers' chunks out of theirs. Stage k+1 is written while peers may still read k and k-1, and a slot is
// written again only when every peer's done has passed the chunk that was in it. A rank whose contribution
// is shorter goes on publishing, with nothing to copy, so that all counters move alike (I5).
#include <algorithm>
#include <cstring>

#include "cpu/group_state.h"
#include "cpu/siphash.h"
#include "cpu/zero_copy.h"

namespace fccl::cpu {

namespace {

constexpr std::size_t kChunk = 256 << 10;

std::size_t largest_of(std::span<const std::size_t> counts) {
  return *std::max_element(counts.begin(), counts.end());
}

class Gather {
 public:
  Gather(Call& call, const void* input, std::span<void* const> outputs, std::span<const std::size_t> counts,
         std::size_t element)
      : call_(call),
        input_(static_cast<const std::byte*>(input)),
        outputs_(outputs),
        counts_(counts),
        element_(element) {}

  void run() {
    const std::size_t largest = largest_of(counts_) * element_;
    if (largest <= call_.geometry().one_shot_bytes) {
      one_shot();
    } else {
      call_.arrive();
      call_.meet();
      if (!zero_copy_all_gather(call_, outputs_, counts_, element_)) staged(largest);
    }
  }

 private:
  std::size_t bytes(int rank) const { return counts_[static_cast<std::size_t>(rank)] * element_; }
  std::byte* output(int rank) const {
    return static_cast<std::byte*>(outputs_[static_cast<std::size_t>(rank)]);
  }

  void copy_own() {
    const std::size_t size = bytes(call_.rank());
    if (size != 0 && output(call_.rank()) != input_) std::memcpy(output(call_.rank()), input_, size);
  }

  void one_shot() {
    const std::size_t offset = call_.one_shot_offset();
    if (const std::size_t size = bytes(call_.rank()); size != 0) {
      std::memcpy(call_.own_slot(offset), input_, size);
    }
    call_.arrive();
    call_.meet();
    for (int i = 1; i < call_.world_size(); ++i) {
      const int peer = (call_.rank() + i) % call_.world_size();
      if (bytes(peer) != 0) std::memcpy(output(peer), call_.slot(peer, offset), bytes(peer));
    }
    copy_own();
  }

  void staged(std::size_t largest) {
    size_ = std::min<std::size_t>(kChunk, call_.geometry().chunk_bytes);
    const std::uint64_t chunks = (largest + size_ - 1) / size_;
    stage(0);
    for (std::uint64_t k = 0; k < chunks; ++k) {
      if (k + 1 < chunks) stage(k + 1);
      for (int i = 1; i < call_.world_size(); ++i) collect((call_.rank() + i) % call_.world_size(), k);
      call_.publish_done(k + 1);
    }
    call_.finish(chunks);
  }

  // The part of a contribution of `total` bytes that is in chunk k.
  std::size_t part(std::uint64_t k, std::size_t total) const {
    return k * size_ >= total ? 0 : std::min(size_, total - k * size_);
  }

  void stage(std::uint64_t k) {
    const Geometry& geometry = call_.geometry();
    for (int peer = 0; peer < call_.world_size() && k >= geometry.depth; ++peer) {
      call_.await_done(peer, k + 1 - geometry.depth);
    }
    if (const std::size_t size = part(k, bytes(call_.rank())); size != 0) {
      const std::byte* from = input_ + k * size_;
      std::memcpy(call_.own_slot(geometry.staging_offset(k)), from, size);
      // The own contribution's place in the output is filled while the chunk is in cache.
      std::byte* to = output(call_.rank()) + k * size_;
      if (to != from) std::memcpy(to, from, size);
    }
    call_.publish_staged(k + 1);
  }

  void collect(int peer, std::uint64_t k) {
    call_.await_staged(peer, k + 1);
    if (const std::size_t size = part(k, bytes(peer)); size != 0) {
      std::memcpy(output(peer) + k * size_, call_.slot(peer, call_.geometry().staging_offset(k)), size);
    }
  }

  Call& call_;
  const std::byte* const input_;
  const std::span<void* const> outputs_;
  const std::span<const std::size_t> counts_;
  const std::size_t element_;
  std::size_t size_ = 0;
};

}  // namespace

Description describe_all_gather(std::span<const std::size_t> counts, int rank, DType dtype, bool uneven) {
  Description description =
      Description::of(Collective::kAllGather, dtype, counts[static_cast<std::size_t>(rank)]);
  if (uneven) {
    description.flags = Description::kUneven;
    description.output_count = fingerprint(counts);
  }
  return description;
}

void Group::all_gather(const void* input, std::span<void* const> outputs, std::span<const std::size_t> counts,
                       DType dtype, bool uneven, const Deadline& deadline) {
  if (outputs.size() != static_cast<std::size_t>(world_size()) || counts.size() != outputs.size()) {
    const std::string why = "all_gather: " + std::to_string(outputs.size()) +
                            " outputs were given, expected " + std::to_string(world_size()) +
                            ", one for each rank";
    reject(why, deadline);
    throw Error(ErrorKind::kInvalid, "fccl " + why + " (" + state_->where() + ")");
  }
  Description description = describe_all_gather(counts, rank(), dtype, uneven);
  const std::size_t bytes = counts[static_cast<std::size_t>(rank())] * size_of(dtype);
  if (largest_of(counts) * size_of(dtype) > state_->geometry.one_shot_bytes)
    description.input_at = locate(*state_, input, bytes);
  run_call(*state_, description, deadline, [&](Call& call) {
    if (call.world_size() == 1) {
      if (bytes != 0 && outputs[0] != input) std::memmove(outputs[0], input, bytes);
      return;
    }
    Gather(call, input, outputs, counts, size_of(dtype)).run();
  });
}

}  // namespace fccl::cpu
