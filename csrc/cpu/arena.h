// Memory of this process that its peers have mapped: collectives on it need no copies into slots.
//
// One arena per process, which outlives every group. It is a large reservation (a sparse memfd, mapped
// once here and once by each peer); memory is put under a block when the block is handed out and, beyond a
// cache of freed blocks, taken back when it is freed. A peer names a place in it by offset.
//
// A block is handed out again only when no peer can touch it any more. A collective that succeeds has seen
// every peer be done with its memory, so freeing is all it takes; after one that failed, its blocks are in
// quarantine until every peer has left it (see group_state.h, invariant I8).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/description.h"
#include "cpu/block_map.h"
#include "cpu/segment.h"

namespace fccl::cpu {

struct ArenaStats {
  std::uint64_t capacity = 0;     // bytes reserved; no memory by themselves
  std::uint64_t in_use = 0;       // bytes of blocks handed out
  std::uint64_t peak = 0;         // the largest in_use so far
  std::uint64_t cached = 0;       // bytes of freed blocks that keep their memory for the next one
  std::uint64_t quarantined = 0;  // bytes of freed blocks that a peer may still touch
  std::uint64_t blocks = 0;       // blocks handed out
  std::uint64_t refused = 0;      // requests so far that found no memory
  std::map<std::string, std::uint64_t> by_owner;  // bytes in use
};

// Thread-safe.
class Arena {
 public:
  // Freed blocks of at most this much in all keep their memory.
  static constexpr std::uint64_t kCacheLimit = 256ULL << 20;

  // The process's arena, made at first use; null where there is none, and why_none() says why. A forked
  // child has one of its own.
  static Arena* of_process() noexcept;
  static std::string why_none();
  // Whether there is none because somebody wanted none.
  static bool is_turned_off();

  explicit Arena(std::uint64_t capacity);  // throws Error (kSystem); for of_process() and tests
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Memory of `size` bytes, aligned to pages, with undefined contents; null if there is none, or in a forked
  // child. `owner` is for the statistics.
  std::byte* allocate(std::size_t size, const std::string& owner) noexcept;
  // What allocate() returned. Does nothing in a forked child, whose parent's memory it is.
  void free(std::byte* data) noexcept;

  // The offset of `size` bytes at `data`, or kNowhere if they are not all in the arena.
  std::uint64_t locate(const void* data, std::size_t size) const noexcept {
    const auto at = static_cast<std::uint64_t>(static_cast<const std::byte*>(data) - memory_.data());
    return at < memory_.size() && size <= memory_.size() - at ? at : Description::kNowhere;
  }

  // Keeps the blocks that hold these offsets from being handed out again until `over` says true, which
  // is asked whenever memory is wanted. `over` must not call the arena.
  void quarantine(std::span<const std::uint64_t> offsets, std::function<bool()> over);

  std::uint64_t capacity() const noexcept { return memory_.size(); }
  const Segment& memory() const noexcept { return memory_; }
  ArenaStats stats();
  // Gives the memory of cached blocks back to the system.
  void release_cached();

 private:
  struct Block {
    std::uint64_t size = 0;
    int holds = 0;  // quarantines that it is in
    bool freed = false;
    std::string owner;
  };
  using Blocks = std::map<std::uint64_t, Block>;
  struct Quarantine {
    std::vector<std::uint64_t> blocks;
    std::function<bool()> over;
  };

  std::byte* take_block(std::size_t size, const std::string& owner);
  std::optional<std::uint64_t> find_place(std::uint64_t size);
  void end_quarantines();
  void recycle(Blocks::iterator block);
  void trim_cache(std::uint64_t limit);
  void punch(std::uint64_t offset, std::uint64_t size);

  Segment memory_;
  const std::uint32_t generation_;  // fork_generation() of who made it
  std::mutex mutex_;                // all below
  BlockMap map_;
  Blocks blocks_;                                              // handed out, or freed and in quarantine
  std::deque<std::pair<std::uint64_t, std::uint64_t>> cache_;  // (offset, size), oldest first
  std::vector<Quarantine> quarantines_;
  ArenaStats stats_;
};

}  // namespace fccl::cpu
