#include "c10d/process.h"

#include <Python.h>

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <utility>

namespace fccl::c10d_backend {
namespace {

std::atomic<std::uint64_t> generation{0};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });

// Never destroyed: waiting threads may outlive static destructors.
std::function<void()>& interrupt_check() {
  static auto* check = new std::function<void()>();
  return *check;
}

std::function<void(const std::string&)>& warning_sink() {
  static auto* sink = new std::function<void(const std::string&)>();
  return *sink;
}

thread_local std::uint64_t interrupts = 0;

static_assert(sizeof(sigset_t) <= 128);

}  // namespace

std::uint64_t fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

void set_interrupt_check(std::function<void()> check) { interrupt_check() = std::move(check); }

void check_interrupt() {
  if (!interrupt_check()) return;
  try {
    interrupt_check()();
  } catch (...) {
    ++interrupts;
    throw;
  }
}

std::uint64_t interrupts_seen() noexcept { return interrupts; }

void set_warning_sink(std::function<void(const std::string&)> sink) { warning_sink() = std::move(sink); }

void warn(const std::string& message) {
  if (warning_sink()) {
    warning_sink()(message);
  } else {
    std::fprintf(stderr, "%s\n", message.c_str());
  }
}

GilRelease::GilRelease() noexcept {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

GilRelease::~GilRelease() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

SignalsBlocked::SignalsBlocked() noexcept {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  std::memcpy(saved_, &before, sizeof(before));
}

SignalsBlocked::~SignalsBlocked() {
  sigset_t before;
  std::memcpy(&before, saved_, sizeof(before));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace fccl::c10d_backend
