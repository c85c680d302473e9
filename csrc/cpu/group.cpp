#include "cpu/group.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <thread>

#include "common/text.h"
#include "cpu/environment.h"
#include "cpu/group_state.h"
#include "cpu/interrupt.h"
#include "cpu/point_to_point.h"
#include "cpu/tuning.h"

namespace fccl::cpu {

// ---- state ----------------------------------------------------------------------------------

std::string Group::State::where() const {
  return "group '" + config.name + "', rank " + std::to_string(rank()) + " of " +
         std::to_string(world_size());
}

void Group::State::publish(std::atomic<std::uint64_t>& word, std::uint64_t value) const {
  word.store(value, std::memory_order_release);         // P1 in wait.h; I7
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the waiter's
  for (const Control* peer : controls) {
    if (peer->park.parked.load(std::memory_order_relaxed) != 0) {  // P2
      wake_all(word);
      return;
    }
  }
}

Error Group::State::fail(const Error& error) noexcept {
  {
    const std::lock_guard lock(failure_mutex);
    if (failure) return *failure;
    failure = error;
    // In a forked child the segment is the parent's, who has not failed.
    // From when the peers' segments are mapped, ours is by them: not only once connect() has returned.
    if (!controls.empty() && own.data() != nullptr && !left.load() && generation == fork_generation()) {
      StatusLine& status = control().status;
      status.kind = static_cast<std::uint32_t>(error.kind());
      status.failed_at = sequence.load();
      copy_text(error.what(), status.text);
      status.state.store(static_cast<std::uint32_t>(RankState::kFailed), std::memory_order_release);
    }
    failed.store(true);
  }
  wake_everyone();
  return error;
}

void Group::State::after_failure() noexcept {
  if (!failed.load() || reported.exchange(true)) return;
  if (config.on_failure) config.on_failure();
}

Group::State::State() = default;
Group::State::~State() { point_to_point.reset(); }  // its thread uses the others

std::optional<Error> Group::State::held_failure() const {
  const std::lock_guard lock(failure_mutex);
  return failure;
}

void Group::State::throw_if_failed() const {
  if (!failed.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(failure_mutex);
  throw Error(*failure);
}

// Our words wake the peers that wait for us; the peers' words wake a thread of ours that waits for
// them (waking needs no right to write).
void Group::State::wake_everyone() const noexcept {
  if (point_to_point) point_to_point->wake();
  const std::lock_guard lock(failure_mutex);  // against connect(), which fills `controls`
  for (const Control* control : controls) {
    wake_all(control->progress.arrived);
    wake_all(control->progress.staged);
    wake_all(control->progress.done);
  }
}

// ---- one collective -------------------------------------------------------------------------

namespace {
constexpr std::size_t kWithoutNote = offsetof(Description, note);
// Where tensors lie need not agree.
constexpr std::size_t kCompared = offsetof(Description, input_at);
}  // namespace

Call::Call(Group::State& state, const Description& description, const Deadline& deadline)
    : state_(state), description_(description), deadline_(deadline) {
  state_.throw_if_failed();
  if (state_.generation != fork_generation()) {
    throw Error(ErrorKind::kSystem, what() +
                                        ": this process was forked after the group was made, and memory and "
                                        "connections stay with the parent; make a new group in the child");
  }
  if (state_.left.load()) {
    throw Error(ErrorKind::kAborted, what() + ": the group has been destroyed on this rank");
  }
  if (!state_.has_slots && world_size() > 1) [[unlikely]] {
    state_.own.allocate(state_.geometry.one_shot_offset(0), state_.geometry.slot_bytes());
    state_.has_slots = true;
  }
  settle();
  number_ = state_.sequence.load(std::memory_order_relaxed) + 1;
  state_.sequence.store(number_, std::memory_order_relaxed);
  staged_base_ = state_.staged;
  done_base_ = state_.done;
}

// After a rejected call this rank has not seen its peers arrive there; make I4 true again.
void Call::settle() {
  number_ = state_.sequence.load(std::memory_order_relaxed);
  if (state_.settled == number_ || world_size() == 1) return;
  for (int peer = 0; peer < world_size(); ++peer) {
    await(peer, state_.controls[static_cast<std::size_t>(peer)]->progress.arrived, number_);
  }
  state_.settled = number_;
}

void Call::arrive() {
  Control& control = state_.control();
  // Free by I4.
  void* line = &control.descriptions[number_ % kDescriptionLines].description;
  std::memcpy(line, &description_, has_note(description_.collective) ? sizeof(Description) : kWithoutNote);
  if (state_.config.testing.lie) [[unlikely]]
    state_.config.testing.lie(line, false);
  if (description_.input_at != Description::kNowhere || description_.output_at != Description::kNowhere) {
    expose({description_.input_at, description_.output_at});
  }
  state_.publish(control.progress.arrived, number_);
}

void Call::expose(std::vector<std::uint64_t> offsets) {
  state_.exposure = {number_, done_base_ + 1, std::move(offsets)};
}

void Call::meet() {
  const int ranks = world_size();
  for (int peer = 0; peer < ranks; ++peer) {
    await(peer, state_.controls[static_cast<std::size_t>(peer)]->progress.arrived, number_);
  }
  state_.settled = number_;
  // A peer that arrived here and then gave up (a timeout, an abort) has not completed this call, so a
  // rank that comes late must not believe that it did. Lines that hardly ever change: no cost.
  for (int peer = 0; peer < ranks; ++peer) throw_if_peer_failed(peer);

  // Equal bytes fit, the common case.
  const std::uint64_t line = number_ % kDescriptionLines;
  bool equal = true;
  for (const Control* control : state_.controls) {
    equal = equal && std::memcmp(&control->descriptions[line].description, &description_, kCompared) == 0;
  }
  if (equal) [[likely]]
    return;

  std::vector<Description> calls(static_cast<std::size_t>(ranks));
  for (std::size_t peer = 0; peer < calls.size(); ++peer) {
    std::memcpy(&calls[peer], &state_.controls[peer]->descriptions[line].description, sizeof(Description));
    calls[peer].validate();
  }
  const std::string verdict = check_compatible(calls);
  if (!verdict.empty()) mismatch(verdict);
}

void Call::mismatch(const std::string& verdict) const {
  throw Error(ErrorKind::kMismatch, what() + ": " + verdict);
}

void Call::await(int peer, const std::atomic<std::uint64_t>& word, std::uint64_t target) {
  if (peer == rank()) return;
  awaited_ = peer;
  state_.waiter->until(word, target, *this);
}

void Call::await_staged(int peer, std::uint64_t chunks) {
  await(peer, state_.controls[static_cast<std::size_t>(peer)]->progress.staged, staged_base_ + chunks);
}
void Call::await_done(int peer, std::uint64_t chunks) {
  await(peer, state_.controls[static_cast<std::size_t>(peer)]->progress.done, done_base_ + chunks);
}
void Call::publish_staged(std::uint64_t chunks) {
  state_.staged = staged_base_ + chunks;
  state_.publish(state_.control().progress.staged, state_.staged);
}
void Call::publish_done(std::uint64_t chunks) {
  state_.done = done_base_ + chunks;
  state_.publish(state_.control().progress.done, state_.done);
}
void Call::finish(std::uint64_t chunks) {
  if (state_.staged != staged_base_ + chunks) publish_staged(chunks);
  if (state_.done != done_base_ + chunks) publish_done(chunks);
}

std::byte* Call::in_arena(int rank, End end, std::size_t bytes) const {
  const Control& control = *state_.controls[static_cast<std::size_t>(rank)];
  const Description& said = control.descriptions[number_ % kDescriptionLines].description;
  // Copied once: the words are the peer's.
  const std::uint64_t at =
      *const_cast<const volatile std::uint64_t*>(end == End::kInput ? &said.input_at : &said.output_at);
  return in_arena(rank, at, bytes);
}

std::byte* Call::in_arena(int rank, std::uint64_t at, std::size_t bytes) const {
  if (at == Description::kNowhere || !state_.arenas_usable()) return nullptr;
  const std::span<std::byte> arena = state_.node->arena_of(state_.members[static_cast<std::size_t>(rank)]);
  if (at > arena.size() || bytes > arena.size() - at) {
    throw Error(ErrorKind::kSystem, what() + ": rank " + std::to_string(rank) + " says that its tensor of " +
                                        std::to_string(bytes) + " bytes begins at " + std::to_string(at) +
                                        " of its arena, which has " + std::to_string(arena.size()) +
                                        "; its memory is damaged");
  }
  return arena.data() + at;
}

bool Group::State::is_over(const Exposure& exposed) const {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    const ProgressLine& progress = controls[static_cast<std::size_t>(peer)]->progress;
    const auto at_least = [](const std::atomic<std::uint64_t>& word, std::uint64_t value) {
      return word.load(std::memory_order_acquire) >= value;
    };
    if (!at_least(progress.arrived, exposed.number) || at_least(progress.done, exposed.done) ||
        at_least(progress.given_up, exposed.number) ||
        node->is_gone(members[static_cast<std::size_t>(peer)])) {
      continue;
    }
    return false;
  }
  return true;
}

void Group::State::give_up() noexcept {
  if (controls.empty() || generation != fork_generation()) return;
  ProgressLine& progress = control().progress;
  progress.given_up.store(progress.arrived.load(std::memory_order_relaxed), std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // I8: status before, arrivals after
  if (!exposure || config.testing.no_patience) return;
  try {
    const Exposure exposed = std::move(*exposure);
    exposure.reset();
    // A peer that is at work on this rank's memory looks up within milliseconds: the caller gets back memory
    // that is its own. One that has been stopped may come to it later.
    for (const Deadline patience = Deadline::after(kGiveUpPatience); !is_over(exposed);) {
      if (patience.expired()) {
        Arena::of_process()->quarantine(
            exposed.offsets, [self = shared_from_this(), exposed] { return self->is_over(exposed); });
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  } catch (...) {
    // No memory for the bookkeeping.
  }
}

void Call::finish_zero_copy(std::uint64_t chunks) {
  finish(std::max<std::uint64_t>(chunks, 1));
  if (state_.exposure && !state_.config.testing.hasty) {
    for (int peer = 0; peer < world_size(); ++peer) await_done(peer, 1);
  }
  state_.zero_copies.fetch_add(1, std::memory_order_relaxed);
}

std::optional<std::string> Group::State::failure_of(int peer, std::uint64_t number) const {
  const StatusLine& status = controls[static_cast<std::size_t>(peer)]->status;
  const auto state = static_cast<RankState>(status.state.load(std::memory_order_acquire));
  // A peer that failed in a later collective has done its part of this one.
  if (state != RankState::kFailed || peer == rank() || status.failed_at > number) return std::nullopt;
  return text_of(peer);
}

std::string Group::State::text_of(int peer) const {
  char text[sizeof(StatusLine::text)];
  std::memcpy(text, controls[static_cast<std::size_t>(peer)]->status.text, sizeof(text));
  make_printable(text);
  return text;
}

void Call::throw_if_peer_failed(int peer) const {
  if (const auto text = state_.failure_of(peer, number_)) {
    throw Error(ErrorKind::kPeerFailed,
                what() + ": the group has failed on rank " + std::to_string(peer) + ", which says: " + *text);
  }
}

std::string Call::what() const {
  return "fccl " + description_.to_string() + ", collective #" + std::to_string(number_) + " of " +
         state_.where();
}

std::string Call::last_of(int peer) const {
  const std::uint64_t arrived =
      state_.controls[static_cast<std::size_t>(peer)]->progress.arrived.load(std::memory_order_acquire);
  return arrived == 0 ? "it has made no collective" : "its last collective is #" + std::to_string(arrived);
}

std::string Call::who_is_missing() const {
  std::string text;
  for (std::size_t peer = 0; peer < state_.controls.size(); ++peer) {
    const std::uint64_t arrived = state_.controls[peer]->progress.arrived.load(std::memory_order_acquire);
    if (arrived >= number_) continue;
    if (!text.empty()) text += ", ";
    text += "rank " + std::to_string(peer) + " has not called it (" + last_of(static_cast<int>(peer)) + ")";
  }
  if (text.empty()) text = "rank " + std::to_string(awaited_) + " has called it and does not get on with it";
  return text;
}

// Death wins over abort, abort over timeout. Each reason counts only if what is awaited has still not
// happened once the reason is known: a peer may do its part and then leave or die.
void Call::check(const std::atomic<std::uint64_t>& word, std::uint64_t target) {
  const auto reached = [&] { return word.load(std::memory_order_acquire) >= target; };
  const auto state_of = [&](int peer) {
    return static_cast<RankState>(
        state_.controls[static_cast<std::size_t>(peer)]->status.state.load(std::memory_order_acquire));
  };
  const std::string awaited = "rank " + std::to_string(awaited_);

  check_interrupt();

  if (state_.node->is_gone(state_.members[static_cast<std::size_t>(awaited_)]) &&
      state_of(awaited_) == RankState::kActive && !reached()) {
    throw Error(ErrorKind::kPeerDied,
                what() + ": the process of " + awaited +
                    " ended without destroy_process_group() while it was waited for; that rank's "
                    "output says why");
  }
  if (state_of(awaited_) == RankState::kLeft && !reached()) {
    throw Error(ErrorKind::kPeerLeft,
                what() + ": " + awaited + " has left the group: " + state_.text_of(awaited_) + " (" +
                    last_of(awaited_) + "). It will not take part; the ranks must make the same calls");
  }
  state_.throw_if_failed();
  for (int peer = 0; peer < world_size(); ++peer) {
    if (!reached()) throw_if_peer_failed(peer);
  }
  if (deadline_.expired() && !reached()) {
    throw Error(ErrorKind::kTimeout, what() + ": timed out after " +
                                         std::to_string(deadline_.span().count()) +
                                         " ms, the timeout of the call or its group: " + who_is_missing());
  }
}

Error settle_error(Group::State& state, const Error& error) {
  if (!error.is_sticky()) {  // all ranks raise alike, and no data was looked at
    state.exposure.reset();
    return error;
  }
  const Error held = state.fail(error);
  state.give_up();
  state.after_failure();
  return held;
}

void fail_interrupted(Group::State& state, const Description& description) noexcept {
  state.fail(Error(ErrorKind::kInterrupted, "fccl " + description.to_string() + " was interrupted on " +
                                                state.where() + "; the group cannot be used any more"));
  state.give_up();
  state.after_failure();
}

// ---- the group ------------------------------------------------------------------------------

Group::Group(GroupConfig config) : state_(std::make_shared<State>()) { state_->config = std::move(config); }

Group::~Group() { leave("the group was freed there"); }

int Group::rank() const noexcept { return state_->rank(); }
int Group::world_size() const noexcept { return state_->world_size(); }
const std::string& Group::why_not() const noexcept { return state_->why_not; }
const std::vector<std::uint64_t>& Group::words() const noexcept { return state_->words; }

bool Group::spins() const noexcept {
  return state_->waiter && state_->waiter->policy(false).spin.count() > 0;
}
std::uint64_t Group::sequence_number() const noexcept {
  return state_->sequence.load(std::memory_order_relaxed);
}

std::uint64_t Group::zero_copy_count() const noexcept {
  return state_->zero_copies.load(std::memory_order_relaxed);
}
std::string Group::why_no_zero_copy() const {
  return state_->node == nullptr ? "the group has no peers on shared memory" : state_->why_no_arenas;
}

void Group::barrier(const Deadline& deadline) {
  gate(Description::of(Collective::kBarrier, DType::kBytes, 0), deadline);
}

void Group::gate(const Description& description, const Deadline& deadline) {
  run_call(*state_, description, deadline, [](Call& call) {
    if (call.world_size() == 1) return;
    call.arrive();
    call.meet();
  });
}

void Group::reject(const std::string& why, const Deadline& deadline) noexcept {
  State& state = *state_;
  if (!state.connected || state.world_size() == 1 || state.failed.load() || state.left.load() ||
      state.generation != fork_generation()) {
    return;
  }
  const Description description = Description::rejected(why);
  const std::uint64_t number = state.sequence.load(std::memory_order_relaxed) + 1;
  // Line `number` was last used for number - kDescriptionLines, which peers are done with if all of
  // them have arrived one later (I2). If that is not known, do as other calls do and see the peers arrive
  // at the last number first: skipping this number would pair later calls wrongly.
  if (number >= state.settled + kDescriptionLines) {
    try {
      run_call(state, description, deadline, [](Call& call) { call.arrive(); });
    } catch (...) {  // the group has failed, and says so from now on
    }
    return;
  }
  state.sequence.store(number, std::memory_order_relaxed);
  state.control().descriptions[number % kDescriptionLines].description = description;
  state.publish(state.control().progress.arrived, number);
}

void Group::abort(const std::string& reason) noexcept {
  state_->fail(Error(ErrorKind::kAborted, "fccl " + state_->where() + " was aborted: " + reason));
  state_->after_failure();
}

// The order matters: once requests are ended their memory is the caller's again, and a peer that fetches from
// it must see by then that this rank has left (matcher.h).
void Group::leave(const std::string& why) noexcept {
  State& state = *state_;
  // In a forked child the segment is the parent's, who is still there.
  if (!state.connected || state.own.data() == nullptr || state.generation != fork_generation()) {
    state.left.store(true);
    return;
  }
  if (state.leaving.exchange(true)) return;
  const std::chrono::milliseconds grace = state.config.testing.send_grace;
  if (state.point_to_point) state.point_to_point->drain(grace.count() != 0 ? grace : kSendGrace);
  {
    const std::lock_guard lock(state.failure_mutex);
    state.left.store(true);
    StatusLine& status = state.control().status;
    if (status.state.load() == static_cast<std::uint32_t>(RankState::kActive)) {
      copy_text(why, status.text);
      status.state.store(static_cast<std::uint32_t>(RankState::kLeft));
    }
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  end_messages(why);
  state.wake_everyone();
}

void Group::end_messages(const std::string& why) noexcept {
  const State& state = *state_;
  if (!state.point_to_point || state.generation != fork_generation()) return;
  state.point_to_point->stop(
      Error(ErrorKind::kAborted, "fccl " + state.where() + ": the group was destroyed here: " + why));
}

std::vector<int> Group::missing_ranks() const {
  std::vector<int> missing;
  for (std::size_t peer = 0; peer < state_->controls.size(); ++peer) {
    if (state_->controls[peer]->progress.arrived.load(std::memory_order_acquire) < sequence_number())
      missing.push_back(static_cast<int>(peer));
  }
  return missing;
}

std::optional<std::string> Group::trouble_of_a_peer() const {
  if (!state_->connected) return std::nullopt;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (auto text = state_->failure_of(peer, sequence_number())) {
      return "the group has failed on rank " + std::to_string(peer) + ", which says: " + *text;
    }
  }
  return std::nullopt;
}

std::optional<std::string> Group::lost_rank() const {
  if (!state_->connected) return std::nullopt;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    const auto at = static_cast<std::size_t>(peer);
    // Looked at after the process: who says goodbye does so before its end.
    const bool gone = state_->node->is_gone(state_->members[at]);
    const auto state =
        static_cast<RankState>(state_->controls[at]->status.state.load(std::memory_order_acquire));
    const std::string who = "rank " + std::to_string(peer);
    if (state == RankState::kLeft) return who + " has left the group: " + state_->text_of(peer);
    if (gone) {
      return "the process of " + who + " ended without destroy_process_group(); that rank's output says why";
    }
  }
  return std::nullopt;
}

std::optional<Error> Group::failure() const { return state_->held_failure(); }

PointToPoint& Group::point_to_point() const { return *state_->point_to_point; }

}  // namespace fccl::cpu
