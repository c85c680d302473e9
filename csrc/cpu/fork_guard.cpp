#include "cpu/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>

namespace fccl::cpu {

namespace {

// A plain table, because the child of a threaded process may neither lock nor allocate. Beyond its
// size a descriptor is not guarded, which delays the detection of a death and breaks nothing.
std::array<std::atomic<int>, 4096> guarded{};  // fd + 1; 0 is free

void replace_all() {
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (std::atomic<int>& slot : guarded) {
    const int fd = slot.load(std::memory_order_relaxed) - 1;
    if (fd < 0) continue;
    if (null >= 0) {
      ::dup3(null, fd, O_CLOEXEC);
    } else {
      ::close(fd);
    }
    slot.store(0, std::memory_order_relaxed);
  }
  if (null >= 0) ::close(null);
}

}  // namespace

void close_in_children(int fd) noexcept {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, replace_all); });
  for (std::atomic<int>& slot : guarded) {
    int expected = 0;
    if (slot.compare_exchange_strong(expected, fd + 1)) return;
  }
}

void forget_descriptor(int fd) noexcept {
  for (std::atomic<int>& slot : guarded) {
    int expected = fd + 1;
    if (slot.compare_exchange_strong(expected, 0)) return;
  }
}

}  // namespace fccl::cpu
