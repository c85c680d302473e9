// Inside a Group: what it holds, and one collective in progress. For csrc/cpu/*.cpp only.
//
// The rendezvous. Every collective has a number n, counted per group. A rank begins it by writing its
// description into line n % kDescriptionLines and storing arrived = n. Then it waits until every peer
// has arrived at n and compares the descriptions. No peer's data is read before that.
//
// Invariants (cited by number elsewhere):
//   I1  Every word and slot has one writer, its owner.
//   I2  A rank stores arrived = n only after it is done with n-1 altogether, reading peers' slots included.
//   I3  A rank that waited for all arrivals at n therefore knows that nobody uses anything of n-1 or
//       earlier any more: slots of n-1 may be written again.
//   I4  A rank that is about to begin n has seen all arrivals at n-1 (`settle`), so what was used for
//       n-2 is free: two slots, used by parity of n, are enough for data that is published together
//       with the arrival, and two description lines would be enough.
//   I5  At the end of every collective, each rank has advanced `staged` and `done` by the call's
//       number of chunks, whether or not it used them: the counters' values at the start of a call
//       are the same on all ranks, so a rank knows what value of a peer's counter to wait for.
//   I6  A verdict is a pure function of all descriptions. If calls do not fit, every rank finds so at
//       the same number, all of them raise, the number is used up and the group goes on.
//   I7  A release store of a counter after the data, and an acquire load of it before, order the two.
//   I8  A rank whose tensors lie in its arena lets its peers at them from arrived = n on. It has them for
//       itself again when, for each peer, one of these holds: the peer's `done` has grown in n (it touches
//       them no more; a success waits for just that), its process is gone, it has given n up (`given_up`),
//       or it has not arrived at n. In the last case it never will touch them: this rank has failed, so
//       status = failed; fence; look at arrived  here, and  arrived = n; fence; look at status  in the
//       peer's meet(), of which at least one sees the other's store.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/group.h"
#include "cpu/layout.h"
#include "cpu/node.h"
#include "cpu/segment.h"
#include "cpu/wait.h"

namespace fccl::cpu {

class PointToPoint;

struct Group::State : std::enable_shared_from_this<Group::State> {
  GroupConfig config;

  // ---- set by connect(); `controls` under failure_mutex, since abort() may come at any time ----
  bool tried = false;
  std::atomic<bool> connected{false};
  std::string why_not;
  std::vector<std::uint64_t> words;  // by rank
  std::string why_no_arenas;         // the same emptiness on all ranks: if not empty, no call uses arenas
  std::shared_ptr<Node> node;
  std::vector<int> members;    // rank in the group -> member of the node
  std::uint64_t group_id = 0;  // random, the same on all ranks
  Geometry geometry;
  Segment own;
  std::vector<Segment> mapped;             // by rank; empty for oneself
  std::vector<const std::byte*> segments;  // by rank, own included
  std::vector<const Control*> controls;    // by rank, own included
  std::optional<Waiter> waiter;
  std::uint32_t generation = 0;  // fork_generation() at connect()
  std::unique_ptr<PointToPoint> point_to_point;

  // ---- owned by the thread that makes the collectives ----
  bool has_slots = false;    // whether there is memory under own slots
  std::uint64_t staged = 0;  // what own progress.staged holds
  std::uint64_t done = 0;
  std::uint64_t settled = 0;  // all ranks are known to have arrived here
  std::atomic<std::uint64_t> sequence{0};
  std::atomic<std::uint64_t> zero_copies{0};

  // Since this call peers may be at our arena's memory (I8): its number, and where.
  struct Exposure {
    std::uint64_t number;
    std::uint64_t done;  // what a peer's `done` must reach
    std::vector<std::uint64_t> offsets;
  };
  std::optional<Exposure> exposure;

  // ---- any thread ----
  mutable std::mutex failure_mutex;
  std::optional<Error> failure;
  std::atomic<bool> failed{false};
  std::atomic<bool> reported{false};  // whether on_failure has been called
  std::atomic<bool> left{false};      // stored under failure_mutex, as `failure` is
  std::atomic<bool> leaving{false};

  State();
  ~State();

  bool arenas_usable() const { return node != nullptr && why_no_arenas.empty(); }
  int rank() const { return config.rank; }
  int world_size() const { return config.world_size; }
  Control& control() const { return *reinterpret_cast<Control*>(own.data()); }
  std::string where() const;  // "group 'x', rank 0 of 2"

  // Stores a counter of ours and wakes peers that sleep.
  void publish(std::atomic<std::uint64_t>& word, std::uint64_t value) const;
  // Fails the group unless it has failed already; returns the error that holds.
  Error fail(const Error& error) noexcept;
  // Calls the user's on_failure if the group has failed and nobody has yet. Whoever may have called fail()
  // calls this once it holds no lock and its peers need nothing more of it: it runs what users wrote.
  void after_failure() noexcept;
  void throw_if_failed() const;
  std::optional<Error> held_failure() const;
  // What `peer` says if it has failed in collective `number` or before.
  std::optional<std::string> failure_of(int peer, std::uint64_t number) const;
  // What `peer`, which has failed or left, says of that.
  std::string text_of(int peer) const;
  void wake_everyone() const noexcept;

  // Whether no peer can be at what was exposed any more (I8). Only for a rank that has failed.
  bool is_over(const Exposure& exposed) const;
  // For a rank whose call ended in a sticky error: says that it has given the call up, and sees to its own
  // memory.
  void give_up() noexcept;
};

enum class End { kInput, kOutput };

// One collective in progress.
class Call final : public WaitCheck {
 public:
  // Takes a number. Throws if the group has failed, or was made before a fork.
  Call(Group::State& state, const Description& description, const Deadline& deadline);

  // Publishes description and arrival.
  void arrive();
  // Waits for every arrival and compares. Throws kMismatch (I6).
  void meet();

  std::uint64_t number() const { return number_; }
  // Waits until `peer` has staged, or is done with, `chunks` chunks of this call.
  void await_staged(int peer, std::uint64_t chunks);
  void await_done(int peer, std::uint64_t chunks);
  void publish_staged(std::uint64_t chunks);
  void publish_done(std::uint64_t chunks);
  // Keeps I5.
  void finish(std::uint64_t chunks);
  // As finish(), for a call in which memory in arenas was used, after this rank is done with the peers':
  // waits until they are done with its own.
  void finish_zero_copy(std::uint64_t chunks);
  // All ranks know that they cannot make this call: throws kMismatch.
  [[noreturn]] void mismatch(const std::string& verdict) const;
  // Before arrive(): from then on peers may be at these places in our arena.
  void expose(std::vector<std::uint64_t> offsets);

  // Own slots, to write; a peer's, to read.
  std::byte* own_slot(std::size_t offset) const { return state_.own.data() + offset; }
  const std::byte* slot(int rank, std::size_t offset) const {
    pause();
    return state_.segments[static_cast<std::size_t>(rank)] + offset;
  }
  // For tests: gives races room.
  void pause() const {
    if (state_.config.testing.pause) [[unlikely]]
      state_.config.testing.pause();
  }
  // After meet(): where `rank` says that its input or output of `bytes` bytes lies, or null if that is not in
  // its arena. Throws kSystem if it is a place outside, on every rank alike.
  std::byte* in_arena(int rank, End end, std::size_t bytes) const;
  std::byte* in_arena(int rank, std::uint64_t at, std::size_t bytes) const;
  const Geometry& geometry() const { return state_.geometry; }
  // The one-shot slot of this call (I4).
  std::size_t one_shot_offset() const {
    return state_.geometry.one_shot_offset(state_.config.testing.single_one_shot ? 0 : number_ % 2);
  }
  int rank() const { return state_.rank(); }
  int world_size() const { return state_.world_size(); }

  void check(const std::atomic<std::uint64_t>& word, std::uint64_t target) override;
  // The same for a wait on `peer`.
  void check_peer(int peer, const std::atomic<std::uint64_t>& word, std::uint64_t target) {
    awaited_ = peer;
    check(word, target);
  }

 private:
  void await(int peer, const std::atomic<std::uint64_t>& word, std::uint64_t target);
  void settle();
  void throw_if_peer_failed(int peer) const;
  std::string what() const;
  std::string who_is_missing() const;
  std::string last_of(int peer) const;  // "its last collective is #3"

  Group::State& state_;
  const Description description_;
  const Deadline deadline_;
  std::uint64_t number_ = 0;
  std::uint64_t staged_base_ = 0;
  std::uint64_t done_base_ = 0;
  int awaited_ = -1;

  friend class Group;
};

// Fails the group with an error that is sticky and returns it, or returns the error as it is.
Error settle_error(Group::State& state, const Error& error);
// For what an interrupt check threw.
void fail_interrupted(Group::State& state, const Description& description) noexcept;

// Runs `body(call)`; a sticky error fails the group, and so does anything an interrupt check throws.
template <typename Body>
void run_call(Group::State& state, const Description& description, const Deadline& deadline, Body&& body) {
  try {
    Call call(state, description, deadline);
    body(call);
    state.exposure.reset();
  } catch (const Error& error) {
    throw Error(settle_error(state, error));
  } catch (...) {
    fail_interrupted(state, description);
    throw;
  }
}

}  // namespace fccl::cpu
