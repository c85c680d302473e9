// One direction between two ranks: a ring of records that the owner writes and its peer reads.
//
// Both ranks of a pair own a lane to the other (I1). A ring's position is a count of bytes since the
// beginning: `posted` in the owner's words, `read` in those of the peer's lane. A record never wraps: what is
// left at the end of the ring is filled by one that says so. What the peer has read may be written again.
//
// Whoever publishes a word of a lane rings its bell: bell grows; fence; look whether the peer sleeps on it.
// That is the pattern of wait.h with `bell` as the counter, so no ring is lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cpu/group_state.h"
#include "cpu/layout.h"

namespace fccl::cpu {

enum class RecordKind : std::uint32_t {
  kSkip = 1,  // nothing more in this round of the ring
  kEager,     // a message, its bytes behind the record
  kOffer,     // a message that is fetched when somebody wants it
  kGo,        // somebody wants it: put it into the slots (of an offer outside the arena)
  kTaken,     // it has been fetched out of the arena
  kRefused,   // whoever wanted it expected another size or dtype, which is told here
};

// Read from a peer's memory: LaneReader checks kind and size, the rest is for the matcher to check.
struct alignas(64) Record {
  RecordKind kind = RecordKind::kSkip;
  std::uint32_t dtype = 0;
  std::uint64_t id = 0;  // of the message, counted by its sender
  std::int64_t tag = 0;
  std::uint64_t count = 0;                   // elements
  std::uint64_t bytes = 0;                   // of the message
  std::uint64_t at = Description::kNowhere;  // of an offer, in the sender's arena
};
static_assert(sizeof(Record) == 64 && kRingBytes % sizeof(Record) == 0);

// A lane as both ends see it. Not thread-safe.
class Lane {
 public:
  Lane(Group::State& state, int peer);

  // ---- the own lane ----

  // Puts a record, and a message behind it if it is eager, into the ring; false if there is no room now.
  bool write(const Record& record, const void* message);
  // The slot of the own chunk that is staged next; null while the peer has not emptied it.
  std::byte* free_slot();
  void publish_staged();

  // ---- the peer's ----

  // The next record, copied, if there is one; `message` then points to its bytes, valid until next().
  std::optional<Record> peek(const std::byte*& message);
  void next();
  // The peer's chunk that comes next, if it is there.
  const std::byte* next_chunk();
  void publish_copied();
  // How many bytes of the peer's messages this rank keeps for receives to come, and the peer of ours.
  void publish_kept(std::uint64_t bytes);
  std::uint64_t kept_by_peer() const { return theirs_->words.kept.load(std::memory_order_relaxed); }

  // ---- both ----

  // Publishes what was read, and wakes the peer if anything was published since.
  void ring();
  // What to sleep on, between sleep() and wake() so that the peer knows.
  const std::atomic<std::uint64_t>& bell() const { return theirs_->words.bell; }
  void sleep() { mine_->park.parked.fetch_add(1, std::memory_order_relaxed); }
  void wake() { mine_->park.parked.fetch_sub(1, std::memory_order_relaxed); }

 private:
  [[noreturn]] void damaged(const std::string& what) const;

  Group::State& state_;
  const int peer_;
  LaneControl* const mine_;
  const LaneControl* const theirs_;
  std::byte* const ring_;
  const std::byte* const their_ring_;
  bool has_ring_ = false;  // whether there is memory under the own one
  bool has_slots_ = false;
  bool dirty_ = false;
  std::uint64_t posted_ = 0;
  std::uint64_t read_ = 0;
  std::uint64_t step_ = 0;  // bytes of the record that peek() gave
  std::uint64_t staged_ = 0;
  std::uint64_t copied_ = 0;
  std::uint64_t bell_ = 0;
};

}  // namespace fccl::cpu
