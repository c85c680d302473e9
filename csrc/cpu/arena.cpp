#include "cpu/arena.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <memory>

#include "common/error.h"
#include "cpu/environment.h"

namespace fccl::cpu {

namespace {

constexpr std::uint64_t kPage = 4096;

// Never destroyed: tensors in the arena may outlive static destructors.
struct Registry {
  const std::uint32_t generation = fork_generation();
  std::mutex mutex;
  bool tried = false;
  bool turned_off = false;
  Arena* arena = nullptr;
  std::string why_none;
};

// In a forked child another one: the parent's mutex may have been held when it was forked.
Registry& registry() {
  static std::atomic<Registry*> current{new Registry()};
  Registry* found = current.load(std::memory_order_acquire);
  while (found->generation != fork_generation()) {
    auto fresh = std::make_unique<Registry>();
    if (current.compare_exchange_strong(found, fresh.get())) return *fresh.release();
  }
  return *found;
}

// Address space, not memory: as much as there is memory at all, so that it never is what runs out first.
std::uint64_t capacity_of_process() {
  const std::uint64_t wish = arena_size();
  const auto pages = static_cast<std::uint64_t>(std::max(0L, ::sysconf(_SC_PHYS_PAGES)));
  const std::uint64_t all = pages * static_cast<std::uint64_t>(std::max(0L, ::sysconf(_SC_PAGESIZE)));
  return std::min(wish, all) / kPage * kPage;
}

}  // namespace

Arena* Arena::of_process() noexcept {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  if (r.tried) return r.arena;
  r.tried = true;
  try {
    if (!shared_memory_enabled()) {
      r.turned_off = true;
      r.why_none = "the environment variable FCCL_SHM turns shared memory off";
    } else if (const std::uint64_t capacity = capacity_of_process(); capacity == 0) {
      r.turned_off = true;
      r.why_none = "the environment variable FCCL_ARENA_SIZE turns it off";
    } else {
      r.arena = new Arena(capacity);
    }
  } catch (const std::exception& error) {
    try {
      r.why_none = error.what();
    } catch (...) {
    }
  }
  return r.arena;
}

std::string Arena::why_none() {
  of_process();
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  return r.why_none;
}

bool Arena::is_turned_off() {
  of_process();
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  return r.turned_off;
}

Arena::Arena(std::uint64_t capacity)
    : memory_(Segment::reserve(capacity)), generation_(fork_generation()), map_(capacity) {
  stats_.capacity = capacity;
}

std::byte* Arena::allocate(std::size_t size, const std::string& owner) noexcept {
  if (generation_ != fork_generation()) return nullptr;
  const std::lock_guard lock(mutex_);
  try {
    if (std::byte* data = take_block(size, owner)) return data;
  } catch (const std::exception&) {
    // No memory for the bookkeeping, or none from the system: both are a request refused.
  }
  ++stats_.refused;
  return nullptr;
}

std::byte* Arena::take_block(std::size_t size, const std::string& owner) {
  if (size > memory_.size()) return nullptr;
  const std::uint64_t rounded = std::max<std::uint64_t>((size + kPage - 1) / kPage * kPage, kPage);
  end_quarantines();
  std::uint64_t offset = 0;
  Block block{rounded, 0, false, owner};
  const auto cached =
      std::find_if(cache_.rbegin(), cache_.rend(), [&](const auto& part) { return part.second == rounded; });
  if (cached != cache_.rend()) {
    offset = cached->first;
    blocks_.emplace(offset, std::move(block));
    cache_.erase(std::next(cached).base());
    stats_.cached -= rounded;
  } else {
    auto place = find_place(rounded);
    if (!place) {
      trim_cache(0);
      place = find_place(rounded);
    }
    if (!place) return nullptr;
    offset = *place;
    const auto entry = blocks_.emplace(offset, std::move(block)).first;
    // Memory is put under the block here: a store into a hole that cannot be filled would raise SIGBUS, in a
    // peer too.
    if (memory_.put_memory(offset, rounded) != 0) {
      punch(offset, rounded);
      blocks_.erase(entry);
      map_.give_back(offset, rounded);
      return nullptr;
    }
  }
  ++stats_.blocks;
  stats_.in_use += rounded;
  stats_.peak = std::max(stats_.peak, stats_.in_use);
  stats_.by_owner[owner] += rounded;
  return memory_.data() + offset;
}

std::optional<std::uint64_t> Arena::find_place(std::uint64_t size) {
  // A quarter of what is left stays for the program itself; the kernel answers more than there is not by an
  // error but by killing a process.
  if (size > available_memory() / 4 * 3) return std::nullopt;
  static const bool large = large_pages() != LargePages::kNever;
  return map_.take(size, large && size >= kLargePage ? kLargePage : 1);
}

void Arena::free(std::byte* data) noexcept {
  // Before the lock, which may have been held when the child was forked.
  if (data == nullptr || generation_ != fork_generation()) return;
  const std::lock_guard lock(mutex_);
  const auto it = blocks_.find(static_cast<std::uint64_t>(data - memory_.data()));
  if (it == blocks_.end() || it->second.freed) return;
  Block& block = it->second;
  block.freed = true;
  --stats_.blocks;
  stats_.in_use -= block.size;
  if (const auto owner = stats_.by_owner.find(block.owner); owner != stats_.by_owner.end()) {
    owner->second -= block.size;
    if (owner->second == 0) stats_.by_owner.erase(owner);
  }
  if (block.holds != 0) {
    stats_.quarantined += block.size;
  } else {
    recycle(it);
  }
}

// The block's memory is kept for the next of its size: putting memory under a block costs more than a
// collective on it.
void Arena::recycle(Blocks::iterator it) {
  const auto [offset, size] = std::pair(it->first, it->second.size);
  blocks_.erase(it);
  try {
    cache_.emplace_back(offset, size);
    stats_.cached += size;
    trim_cache(kCacheLimit);
  } catch (const std::exception&) {
    // No memory for the bookkeeping: the block is lost, which is the least of the program's troubles.
  }
}

void Arena::trim_cache(std::uint64_t limit) {
  while (stats_.cached > limit) {
    const auto [offset, size] = cache_.front();
    map_.give_back(offset, size);
    cache_.pop_front();
    stats_.cached -= size;
    punch(offset, size);
  }
}

void Arena::punch(std::uint64_t offset, std::uint64_t size) {
  // Should it fail, the memory stays where it is and serves the next block there.
  (void)::fallocate(memory_.descriptor().get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(offset), static_cast<off_t>(size));
}

void Arena::quarantine(std::span<const std::uint64_t> offsets, std::function<bool()> over) {
  if (generation_ != fork_generation()) return;
  const std::lock_guard lock(mutex_);
  Quarantine entry{{}, std::move(over)};
  for (const std::uint64_t offset : offsets) {
    auto it = blocks_.upper_bound(offset);
    if (it == blocks_.begin()) continue;
    --it;
    if (offset - it->first >= it->second.size || it->second.freed) continue;
    entry.blocks.push_back(it->first);
  }
  quarantines_.push_back(std::move(entry));
  for (const std::uint64_t offset : quarantines_.back().blocks) ++blocks_.find(offset)->second.holds;
}

void Arena::end_quarantines() {
  for (std::size_t i = quarantines_.size(); i-- > 0;) {
    if (!quarantines_[i].over()) continue;
    const Quarantine ended = std::move(quarantines_[i]);
    quarantines_.erase(quarantines_.begin() + static_cast<std::ptrdiff_t>(i));
    for (const std::uint64_t offset : ended.blocks) {
      const auto it = blocks_.find(offset);
      if (--it->second.holds != 0 || !it->second.freed) continue;
      stats_.quarantined -= it->second.size;
      recycle(it);
    }
  }
}

ArenaStats Arena::stats() {
  if (generation_ != fork_generation()) return {};
  const std::lock_guard lock(mutex_);
  end_quarantines();
  return stats_;
}

void Arena::release_cached() {
  if (generation_ != fork_generation()) return;
  const std::lock_guard lock(mutex_);
  end_quarantines();
  trim_cache(0);
}

}  // namespace fccl::cpu
