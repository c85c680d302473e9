#include "cpu/handover.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/layout.h"

namespace fccl::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// The least of several short rounds: whatever else runs on the cores only ever makes one longer.
constexpr int kRounds = 8;
constexpr std::uint64_t kTurns = 2000;
// A thread that is not given its core must not keep the other spinning for ever.
constexpr auto kPatience = std::chrono::milliseconds(200);

struct alignas(kLine) Word {
  std::atomic<std::uint64_t> value{0};
};

bool run_on(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(core), &set);
  return ::pthread_setaffinity_np(::pthread_self(), sizeof(set), &set) == 0;
}

// False when time is up.
bool await(const Word& word, std::uint64_t value, Clock::time_point end) {
  for (std::uint64_t polls = 1; word.value.load(std::memory_order_acquire) < value; ++polls) {
    if (polls % 4096 == 0 && Clock::now() > end) return false;
  }
  return true;
}

std::optional<double> between(int one, int other) {
  std::array<Word, 2> words;
  const Clock::time_point end = Clock::now() + kPatience;
  std::optional<double> least;
  const auto bounce = [&](int side) {
    if (!run_on(side == 0 ? one : other)) return;
    Word& mine = words[static_cast<std::size_t>(side)];
    const Word& theirs = words[static_cast<std::size_t>(1 - side)];
    std::uint64_t turn = 0;
    for (int round = 0; round < kRounds; ++round) {
      const Clock::time_point begin = Clock::now();
      for (std::uint64_t i = 0; i < kTurns; ++i) {
        ++turn;
        if (side == 1 && !await(theirs, turn, end)) return;
        mine.value.store(turn, std::memory_order_release);
        if (side == 0 && !await(theirs, turn, end)) return;
      }
      const double ns = std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
      if (side == 0) least = std::min(least.value_or(1e9), ns / kTurns / 2);
    }
  };
  try {
    std::thread second(bounce, 1);
    try {
      std::thread first(bounce, 0);
      first.join();
    } catch (const std::system_error&) {
      // The second one gives up when its patience ends.
    }
    second.join();
  } catch (const std::system_error&) {
  }
  return least;
}

}  // namespace

std::optional<Handover> measure_handover(int most_cores) {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return std::nullopt;
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(static_cast<std::size_t>(core), &set)) cores.push_back(core);
  }
  std::optional<Handover> found;
  const std::size_t others = cores.empty() ? 0 : cores.size() - 1;
  const std::size_t looked_at =
      std::min<std::size_t>(others, static_cast<std::size_t>(std::max(1, most_cores - 1)));
  for (std::size_t i = 1; i <= looked_at; ++i) {
    const auto ns = between(cores[0], cores[i * others / looked_at]);
    if (!ns) continue;
    if (!found) found = Handover{*ns, *ns};
    found->nearest_ns = std::min(found->nearest_ns, *ns);
    found->farthest_ns = std::max(found->farthest_ns, *ns);
  }
  return found;
}

}  // namespace fccl::cpu
