// Waiting for a counter in another process's memory.
//
// A waiter spins for a bounded time, then yields, then parks on a futex. It parks on the counter it
// waits for: the counter's low 32 bits are the futex word, in the owner's segment, so the futex must
// be a shared one (std::atomic::wait uses private futexes, which never wake another process).
//
// No wake-up is lost (Dekker's pattern; W1 and W2 in the waiter, P1 and P2 in the publisher):
//
//   waiter:    W1  parked = 1;  fence(seq_cst);  W2  look at the counter again, sleep if unchanged
//   publisher: P1  counter = n; fence(seq_cst);  P2  look at every peer's parked, wake if one is set
//
// The fences order W1/W2 and P1/P2 in one total order. Either P2 sees W1's flag and wakes, or W2 sees
// P1's value and does not sleep. The kernel compares the word again under its own lock, which covers a
// publish between W2 and the sleep. Should that reasoning ever fail, a slice's end bounds the damage.
//
// A futex compares 32 bits where counters have 64: to sleep wrongly, a counter would have to move by
// exactly 2^32 between W2 and the kernel's comparison.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "cpu/layout.h"

namespace fccl::cpu {

// Marks the calling thread as one that works while another thread of its process computes: it then
// spins only where there are cores for both.
void set_background_thread(bool background) noexcept;
bool is_background_thread() noexcept;

// How long to spin and to yield before parking. Yielding hands the core to whoever can use it, so it
// costs others little; parking costs a wake-up, tens of microseconds in a virtual machine.
struct WaitPolicy {
  std::chrono::nanoseconds spin{0};
  std::chrono::nanoseconds yield{0};
};
// For `ranks` ranks on a machine of which this process may use `cores`.
WaitPolicy wait_policy(int ranks, int cores, bool background) noexcept;

// What a waiter does between two looks at the counter: deadline, abort, liveness, interrupts.
class WaitCheck {
 public:
  // Called about every kParkSlice. Throws to give up, but only if the counter, read once more after
  // the reason was found, still has not reached the target: a peer may do its part and then die.
  virtual void check(const std::atomic<std::uint64_t>& word, std::uint64_t target) = 0;

 protected:
  ~WaitCheck() = default;
};

class Waiter {
 public:
  // `own` is the waiting rank's line; `ranks` the number of ranks that share the machine.
  Waiter(ParkLine* own, int ranks);
  // One policy for all waits (tests).
  Waiter(ParkLine* own, const WaitPolicy& policy);

  const WaitPolicy& policy(bool background) const noexcept { return policies_[background ? 1 : 0]; }

  // Returns when word >= target; everything its owner did before publishing is then visible here.
  void until(const std::atomic<std::uint64_t>& word, std::uint64_t target, WaitCheck& check) {
    if (word.load(std::memory_order_acquire) >= target) [[likely]]
      return;
    slow(word, target, check);
  }

 private:
  void slow(const std::atomic<std::uint64_t>& word, std::uint64_t target, WaitCheck& check);
  bool park(const std::atomic<std::uint64_t>& word, std::uint64_t target);

  ParkLine* own_;
  WaitPolicy policies_[2];  // by background
};

// Wakes whoever sleeps on the counter.
void wake_all(const std::atomic<std::uint64_t>& word) noexcept;

// A word and the value at which to sleep on it.
struct BellWatch {
  const std::uint32_t* word;
  std::uint32_t value;
  bool own;  // of this process alone
};
BellWatch watch(const std::atomic<std::uint64_t>& counter) noexcept;
BellWatch watch(const std::atomic<std::uint32_t>& own) noexcept;
// Sleeps until one of the words has another value, somebody wakes it, or `limit` has passed; on kernels
// before 5.16, and with more words than a call takes, looks every millisecond.
void wait_for_any(const std::vector<BellWatch>& words, std::chrono::nanoseconds limit) noexcept;
void wake_own(const std::atomic<std::uint32_t>& own) noexcept;

// One turn of a spinning loop, the n-th. Every 64th gives the core away for once, in case whoever is waited
// for shares it: the scheduler may leave two ranks on one core for milliseconds, with another one idle.
void spin(unsigned n) noexcept;

}  // namespace fccl::cpu
