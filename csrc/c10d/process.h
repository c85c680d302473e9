// What concerns the process as a whole: forks, the interpreter's lock, Ctrl-C.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace fccl::c10d_backend {

// Grows in every child made by fork(). An object remembers the generation it was made in: threads,
// locks and sockets of an older generation belong to the parent and must not be touched.
std::uint64_t fork_generation() noexcept;

// Called by threads that wait, about ten times a second; throws to stop waiting. Set once, by the
// Python module.
void set_interrupt_check(std::function<void()> check);
void check_interrupt();
// How often check_interrupt() has thrown in this thread: whether an exception is such an interrupt.
std::uint64_t interrupts_seen() noexcept;

// Warns the user: as a Python warning once the module has set a sink, else on standard error.
void set_warning_sink(std::function<void(const std::string&)> sink);
void warn(const std::string& message);

// Releases the interpreter's lock while alive, if this thread holds it. Whoever joins a thread
// needs this: a worker that drops the last reference to a tensor may want that lock.
class GilRelease {
 public:
  GilRelease() noexcept;
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  void* state_ = nullptr;
};

// Blocks all signals in this thread while alive. Threads started meanwhile inherit that, so signals
// keep arriving at the program's own threads.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept;
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  alignas(16) unsigned char saved_[128];
};

}  // namespace fccl::c10d_backend
