#include "cpu/lane.h"

#include <cstring>
#include <string>

#include "cpu/tuning.h"

namespace fccl::cpu {

namespace {

std::uint64_t record_bytes(std::uint64_t message) {
  return sizeof(Record) + (message + sizeof(Record) - 1) / sizeof(Record) * sizeof(Record);
}

}  // namespace

Lane::Lane(Group::State& state, int peer)
    : state_(state),
      peer_(peer),
      mine_(reinterpret_cast<LaneControl*>(state.own.data() + state.geometry.lane_control_offset(peer))),
      theirs_(reinterpret_cast<const LaneControl*>(state.segments[static_cast<std::size_t>(peer)] +
                                                   state.geometry.lane_control_offset(state.rank()))),
      ring_(state.own.data() + state.geometry.lane_offset(peer)),
      their_ring_(state.segments[static_cast<std::size_t>(peer)] + state.geometry.lane_offset(state.rank())) {
}

void Lane::damaged(const std::string& what) const {
  throw Error(ErrorKind::kSystem, "fccl point-to-point, " + state_.where() + ": what rank " +
                                      std::to_string(peer_) + " says of its messages makes no sense (" +
                                      what + "); its memory is damaged");
}

bool Lane::write(const Record& record, const void* message) {
  const std::uint64_t need = record_bytes(message == nullptr ? 0 : record.bytes);
  const std::uint64_t read = theirs_->words.read.load(std::memory_order_acquire);
  if (read > posted_ || posted_ - read > kRingBytes) damaged("bytes read: " + std::to_string(read));
  const std::uint64_t at = posted_ % kRingBytes;
  const std::uint64_t rest = at + need > kRingBytes ? kRingBytes - at : 0;
  if (posted_ - read + rest + need > kRingBytes) return false;
  if (!has_ring_) {
    state_.own.allocate(state_.geometry.lane_offset(peer_), kRingBytes);
    has_ring_ = true;
  }
  if (rest != 0) {
    const Record skip;
    std::memcpy(ring_ + at, &skip, sizeof(skip));
    posted_ += rest;
  }
  std::byte* to = ring_ + posted_ % kRingBytes;
  std::memcpy(to, &record, sizeof(record));
  if (message != nullptr) std::memcpy(to + sizeof(record), message, record.bytes);
  posted_ += need;
  mine_->words.posted.store(posted_, std::memory_order_release);  // I7
  dirty_ = true;
  return true;
}

std::byte* Lane::free_slot() {
  const std::uint64_t copied = theirs_->words.copied.load(std::memory_order_acquire);
  if (copied > staged_) damaged("chunks copied: " + std::to_string(copied));
  if (staged_ - copied >= kLaneChunks && !state_.config.testing.hasty) return nullptr;
  if (!has_slots_) {
    state_.own.allocate(state_.geometry.lane_offset(peer_) + kRingBytes, kLaneChunks * kLaneChunkBytes);
    has_slots_ = true;
  }
  return ring_ + kRingBytes + staged_ % kLaneChunks * kLaneChunkBytes;
}

void Lane::publish_staged() {
  mine_->words.staged.store(++staged_, std::memory_order_release);
  dirty_ = true;
}

std::optional<Record> Lane::peek(const std::byte*& message) {
  while (true) {
    const std::uint64_t available = theirs_->words.posted.load(std::memory_order_acquire) - read_;
    if (available == 0) return std::nullopt;
    const std::uint64_t at = read_ % kRingBytes;
    if (available > kRingBytes || available < sizeof(Record))
      damaged("bytes posted: " + std::to_string(available));
    if (state_.config.testing.pause) [[unlikely]]
      state_.config.testing.pause();
    Record record;
    std::memcpy(&record, their_ring_ + at, sizeof(record));
    if (record.kind < RecordKind::kSkip || record.kind > RecordKind::kRefused)
      damaged("a record of kind " + std::to_string(static_cast<std::uint32_t>(record.kind)));
    const bool eager = record.kind == RecordKind::kEager;
    if (eager && record.bytes > kEagerBytes) damaged("an eager message of " + std::to_string(record.bytes));
    step_ = record.kind == RecordKind::kSkip ? kRingBytes - at : record_bytes(eager ? record.bytes : 0);
    if (step_ > available || at + step_ > kRingBytes) damaged("a record of " + std::to_string(step_));
    if (record.kind != RecordKind::kSkip) {
      message = their_ring_ + at + sizeof(record);
      return record;
    }
    next();
  }
}

void Lane::next() {
  read_ += step_;
  dirty_ = true;
}

const std::byte* Lane::next_chunk() {
  const std::uint64_t staged = theirs_->words.staged.load(std::memory_order_acquire);
  if (staged == copied_) return nullptr;
  if (staged < copied_ || (staged - copied_ > kLaneChunks && !state_.config.testing.hasty))
    damaged("chunks staged: " + std::to_string(staged));
  if (state_.config.testing.pause) [[unlikely]]
    state_.config.testing.pause();
  return their_ring_ + kRingBytes + copied_ % kLaneChunks * kLaneChunkBytes;
}

void Lane::publish_copied() {
  mine_->words.copied.store(++copied_, std::memory_order_release);
  dirty_ = true;
}

void Lane::publish_kept(std::uint64_t bytes) { mine_->words.kept.store(bytes, std::memory_order_relaxed); }

void Lane::ring() {
  if (!dirty_) return;
  dirty_ = false;
  mine_->words.read.store(read_, std::memory_order_release);
  mine_->words.bell.store(++bell_, std::memory_order_release);  // P1 in wait.h
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (state_.config.testing.no_bells) [[unlikely]]
    return;
  if (theirs_->park.parked.load(std::memory_order_relaxed) != 0) wake_all(mine_->words.bell);  // P2
}

}  // namespace fccl::cpu
