// broadcast, one-shot and staged; without copies: zero_copy.h.
//
// One-shot (small): the root writes its message into its one-shot slot before it arrives; the others
// copy it once all have arrived. Parity as in all_reduce (I4).
//
// Staged (large): the root copies chunk after chunk into its staging slots, at most `depth` ahead of
// the slowest peer; peers copy them out and say so. The root's counter `staged` and the peers' counters
// `done` are all there is: slot k is written again only when every peer's done > k - depth.
#include <algorithm>
#include <cstring>

#include "cpu/group_state.h"
#include "cpu/zero_copy.h"

namespace fccl::cpu {

namespace {

// Reading is half the work and no arithmetic hides it, so chunks are shorter than all_reduce's: the
// peers can start sooner and the slots stay in a nearer cache.
constexpr std::size_t kChunk = 256 << 10;

void staged(Call& call, std::byte* buffer, std::size_t bytes, int root) {
  const Geometry& geometry = call.geometry();
  const std::size_t size = std::min<std::size_t>(kChunk, geometry.chunk_bytes);
  const std::uint64_t chunks = (bytes + size - 1) / size;
  for (std::uint64_t k = 0; k < chunks; ++k) {
    const std::size_t begin = k * size;
    const std::size_t length = std::min(size, bytes - begin);
    const std::size_t offset = geometry.staging_offset(k);
    if (call.rank() == root) {
      for (int peer = 0; peer < call.world_size() && k >= geometry.depth; ++peer) {
        call.await_done(peer, k + 1 - geometry.depth);
      }
      std::memcpy(call.own_slot(offset), buffer + begin, length);
      call.publish_staged(k + 1);
    } else {
      call.await_staged(root, k + 1);
      std::memcpy(buffer + begin, call.slot(root, offset), length);
      call.publish_done(k + 1);
    }
  }
  call.finish(chunks);
}

}  // namespace

void Group::check_root(const char* name, int root, const Deadline& deadline) {
  if (root >= 0 && root < world_size()) return;
  const std::string why = std::string(name) + ": root is " + std::to_string(root) +
                          ", expected a rank of the group, 0 to " + std::to_string(world_size() - 1);
  reject(why, deadline);
  throw Error(ErrorKind::kInvalid, "fccl " + why + " (" + state_->where() + ")");
}

void Group::broadcast(void* buffer, std::size_t count, DType dtype, int root, const Deadline& deadline) {
  check_root("broadcast", root, deadline);
  Description description = Description::of(Collective::kBroadcast, dtype, count, root);
  const std::size_t bytes = count * size_of(dtype);
  if (rank() == root && bytes > state_->geometry.one_shot_bytes)
    description.input_at = locate(*state_, buffer, bytes);
  run_call(*state_, description, deadline, [&](Call& call) {
    if (call.world_size() == 1) return;
    if (bytes > call.geometry().one_shot_bytes) {
      call.arrive();
      call.meet();
      if (!zero_copy_broadcast(call, static_cast<std::byte*>(buffer), bytes, root))
        staged(call, static_cast<std::byte*>(buffer), bytes, root);
      return;
    }
    const std::size_t offset = call.one_shot_offset();
    if (call.rank() == root && bytes != 0) std::memcpy(call.own_slot(offset), buffer, bytes);
    call.arrive();
    call.meet();
    if (call.rank() != root && bytes != 0) std::memcpy(buffer, call.slot(root, offset), bytes);
  });
}

}  // namespace fccl::cpu
