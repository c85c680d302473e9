#include "cpu/interrupt.h"

#include <memory>
#include <mutex>

#include "cpu/group.h"

namespace fccl::cpu {

namespace {
std::mutex mutex;
std::shared_ptr<const InterruptCheck> installed;
}  // namespace

void set_interrupt_check(InterruptCheck check) {
  const std::lock_guard lock(mutex);
  installed = check ? std::make_shared<const InterruptCheck>(std::move(check)) : nullptr;
}

void check_interrupt() {
  std::shared_ptr<const InterruptCheck> check;
  {
    const std::lock_guard lock(mutex);
    check = installed;
  }
  // Each thread that waits asks for itself: only the main thread can be interrupted, and a worker
  // that asked on its behalf would use up its turn.
  if (check) (*check)();
}

}  // namespace fccl::cpu
