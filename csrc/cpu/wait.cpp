#include "cpu/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>

#include "cpu/environment.h"
#include "cpu/tuning.h"

namespace fccl::cpu {

namespace {

using Clock = std::chrono::steady_clock;

thread_local bool background_thread = false;

// The low half of a counter, as the kernel sees it.
const std::uint32_t* futex_word(const std::atomic<std::uint64_t>& word) noexcept {
  static_assert(sizeof(std::atomic<std::uint64_t>) == 8);
  const auto* halves = reinterpret_cast<const std::uint32_t*>(&word);
  return std::endian::native == std::endian::little ? halves : halves + 1;
}

// Not FUTEX_PRIVATE_FLAG: the waiter and the waker are different processes.
void futex_wait(const std::uint32_t* word, std::uint32_t expected, std::chrono::nanoseconds limit) noexcept {
  timespec time{};
  time.tv_sec = std::chrono::duration_cast<std::chrono::seconds>(limit).count();
  time.tv_nsec = (limit % std::chrono::seconds(1)).count();
  ::syscall(SYS_futex, word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

}  // namespace

void spin(unsigned n) noexcept {
  if (n % 64 == 0) {
    ::sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

void set_background_thread(bool background) noexcept { background_thread = background; }
bool is_background_thread() noexcept { return background_thread; }

WaitPolicy wait_policy(int ranks, int cores, bool background) noexcept {
  // A rank that only communicates needs one core; one that communicates behind a computation, two.
  const bool room = (background ? 2 : 1) * ranks <= cores;
  if (room) return {kSpinTime, kYieldTime};
  // Behind a computation that needs the core every yield is a switch to it and back, which costs more than
  // being woken: DDP's exposed communication was half as long again and more with yields
  // (docs/performance.md).
  if (background) return {};
  return {{}, kCrowdedYieldTime};
}

Waiter::Waiter(ParkLine* own, int ranks) : own_(own) {
  const int cores = usable_cores();
  for (const bool background : {false, true}) {
    policies_[background ? 1 : 0] = wait_policy(ranks, cores, background);
  }
}

Waiter::Waiter(ParkLine* own, const WaitPolicy& policy) : own_(own), policies_{policy, policy} {}

void Waiter::slow(const std::atomic<std::uint64_t>& word, std::uint64_t target, WaitCheck& check) {
  const WaitPolicy& policy = this->policy(background_thread);
  const Clock::time_point start = Clock::now();

  const Clock::time_point spin_end = start + policy.spin;
  while (policy.spin.count() > 0) {
    for (unsigned i = 1; i <= 256; ++i) {
      if (word.load(std::memory_order_acquire) >= target) return;
      spin(i);
    }
    if (Clock::now() >= spin_end) break;
  }

  const Clock::time_point yield_end = Clock::now() + policy.yield;
  while (policy.yield.count() > 0) {
    for (int i = 0; i < 4; ++i) {
      ::sched_yield();
      if (word.load(std::memory_order_acquire) >= target) return;
    }
    if (Clock::now() >= yield_end) break;
  }

  // Looked at what could have gone wrong after each slice: until then there may be nothing to look for.
  while (!park(word, target)) check.check(word, target);
}

bool Waiter::park(const std::atomic<std::uint64_t>& word, std::uint64_t target) {
  own_->parked.store(1, std::memory_order_relaxed);     // W1
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the publisher's
  const std::uint64_t seen = word.load(std::memory_order_acquire);
  if (seen < target) {  // W2
    futex_wait(futex_word(word), static_cast<std::uint32_t>(seen), kParkSlice);
  }
  own_->parked.store(0, std::memory_order_relaxed);
  return word.load(std::memory_order_acquire) >= target;
}

void wake_all(const std::atomic<std::uint64_t>& word) noexcept {
  ::syscall(SYS_futex, futex_word(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

BellWatch watch(const std::atomic<std::uint64_t>& counter) noexcept {
  return {futex_word(counter), static_cast<std::uint32_t>(counter.load(std::memory_order_acquire)), false};
}

BellWatch watch(const std::atomic<std::uint32_t>& own) noexcept {
  return {reinterpret_cast<const std::uint32_t*>(&own), own.load(std::memory_order_acquire), true};
}

void wake_own(const std::atomic<std::uint32_t>& own) noexcept {
  ::syscall(SYS_futex, &own, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void wait_for_any(const std::vector<BellWatch>& words, std::chrono::nanoseconds limit) noexcept {
  // As in <linux/futex.h> of 5.16 and later; declared here so that older headers do.
  struct Entry {
    std::uint64_t value;
    std::uint64_t address;
    std::uint32_t flags;
    std::uint32_t reserved;
  };
  constexpr std::uint32_t kSize32 = 2;
  constexpr std::uint32_t kPrivate = 128;
  constexpr std::size_t kMost = 128;
  constexpr long kWaitv = 449;
  static std::atomic<bool> missing{false};
  Entry entries[kMost];
  const std::size_t count = std::min(words.size(), kMost);
  for (std::size_t i = 0; i < count; ++i) {
    entries[i] = {words[i].value, reinterpret_cast<std::uintptr_t>(words[i].word),
                  kSize32 | (words[i].own ? kPrivate : 0), 0};
  }
  if (words.size() > kMost) limit = std::min<std::chrono::nanoseconds>(limit, std::chrono::milliseconds(1));
  if (!missing.load(std::memory_order_relaxed)) {
    timespec until{};
    ::clock_gettime(CLOCK_MONOTONIC, &until);  // an absolute time is what it wants
    const std::int64_t nanoseconds = until.tv_nsec + limit.count();
    until.tv_sec += nanoseconds / 1'000'000'000;
    until.tv_nsec = nanoseconds % 1'000'000'000;
    if (::syscall(kWaitv, entries, count, 0, &until, CLOCK_MONOTONIC) >= 0) return;
    if (errno == ETIMEDOUT || errno == EAGAIN || errno == EINTR) return;
    // A kernel, or a sandbox, that does not know it.
    if (errno == ENOSYS || errno == EPERM || errno == EINVAL) missing.store(true, std::memory_order_relaxed);
  }
  const timespec pause{0, static_cast<long>(std::min<std::int64_t>(limit.count(), 1'000'000))};
  ::nanosleep(&pause, nullptr);
}

}  // namespace fccl::cpu
