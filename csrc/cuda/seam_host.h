// seam.h for fibres on a CPU: what a kernel's words do in the tests. The launcher that makes the fibres is
// tests/cpp/cuda/launcher.h.
//
// Stores to peers may be held back (Thread::delay): then they become visible in any order, at any later
// moment, but before anything that the same thread releases afterwards, or that another thread of the block
// releases after a sync(). That is the least that the GPU's memory model promises; x86 alone would hide every
// missing release.
//
// Under ThreadSanitizer each fibre is a thread of its own. Switches between fibres order nothing; sync() and
// the words that release and acquire do. The launcher's own state must stay out of its sight: kUnwatched.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstring>
#include <vector>

#include "cuda/seam.h"

#if defined(FCCL_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#define FCCL_HB_RELEASE(address) __tsan_release(address)
#define FCCL_HB_ACQUIRE(address) __tsan_acquire(address)
#else
#define FCCL_HB_RELEASE(address) ((void)(address))
#define FCCL_HB_ACQUIRE(address) ((void)(address))
#endif
#define FCCL_UNWATCHED __attribute__((no_sanitize("thread"), noinline))

#define FCCL_KERNEL inline
#define FCCL_UNROLL
#define FCCL_NO_UNROLL

namespace fccl::cuda {
namespace host {

struct PeerStore {
  void* to;
  unsigned size;
  unsigned char bytes[16];
};

// Threads that wait for each other: all of a block, or of a warp.
struct Meeting {
  unsigned expected = 0;
  unsigned arrived = 0;
  unsigned round = 0;
  bool any[2] = {false, false};  // of sync_or, by the parity of the round
};

struct Trapped {};  // what trap() throws

struct Thread;

struct Block {
  unsigned index = 0;
  unsigned count = 0;  // blocks of the launch
  unsigned threads = 0;
  Meeting all;
  std::vector<Meeting> warps;
  std::vector<std::uint32_t> words;  // of shuffles, one a thread
  std::vector<unsigned char> shared;
  std::vector<PeerStore> held_back;  // by any thread before a sync() that all have passed
};

// What the words need of the launcher.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  // Lets others run; returns when this thread's turn comes again.
  virtual void yield() = 0;
  virtual std::uint64_t clock_ns() = 0;
  // Makes `stores` visible, in any order, and empties them.
  virtual void make_visible(std::vector<PeerStore>& stores) = 0;
};

struct Thread {
  Scheduler* scheduler = nullptr;
  Block* block = nullptr;
  unsigned index = 0;
  bool delay = false;
  const Meeting* waits_in = nullptr;  // until its round is no more `waits_round`
  unsigned waits_round = 0;
  std::vector<PeerStore> held_back;
};

inline thread_local Thread* running = nullptr;
FCCL_UNWATCHED inline Thread& self() { return *running; }

FCCL_UNWATCHED inline void move_stores(std::vector<PeerStore>& from, std::vector<PeerStore>& to) {
  to.insert(to.end(), from.begin(), from.end());
  from.clear();
}

// Returns whether any thread that met said true.
FCCL_UNWATCHED inline bool meet(Meeting& meeting, bool value) {
  Thread& thread = self();
  const unsigned round = meeting.round;
  bool& any = meeting.any[round % 2];
  any = any || value;
  if (++meeting.arrived < meeting.expected) {
    thread.waits_in = &meeting;
    thread.waits_round = round;
    while (meeting.round == round) thread.scheduler->yield();
    thread.waits_in = nullptr;
  } else {
    meeting.arrived = 0;
    meeting.any[(round + 1) % 2] = false;
    ++meeting.round;
  }
  return any;
}

FCCL_UNWATCHED inline void hold_back(void* to, const void* value, unsigned size) {
  PeerStore store{to, size, {}};
  std::memcpy(store.bytes, value, size);
  self().held_back.push_back(store);
}
FCCL_UNWATCHED inline bool delays() { return self().delay; }
FCCL_UNWATCHED inline void release_stores() {
  Thread& thread = self();
  if (!thread.delay) return;
  move_stores(thread.block->held_back, thread.held_back);
  thread.scheduler->make_visible(thread.held_back);
}

}  // namespace host

inline unsigned block_index() { return host::self().block->index; }
inline unsigned block_count() { return host::self().block->count; }
inline unsigned thread_index() { return host::self().index; }
inline unsigned thread_count() { return host::self().block->threads; }

inline bool sync_or(bool value) {
  host::Block& block = *host::self().block;
  // Before it meets the others: what it stored is covered by their releases from then on.
  if (host::delays()) host::move_stores(host::self().held_back, block.held_back);
  FCCL_HB_RELEASE(&block.all);
  const bool any = host::meet(block.all, value);
  FCCL_HB_ACQUIRE(&block.all);
  return any;
}
inline void sync() { sync_or(false); }

FCCL_UNWATCHED inline std::uint32_t exchange_words(std::uint32_t value, int mask) {
  host::Thread& thread = host::self();
  host::Block& block = *thread.block;
  host::Meeting& warp = block.warps[thread.index / kWarpSize];
  block.words[thread.index] = value;
  host::meet(warp, false);
  const std::uint32_t result = block.words[thread.index ^ static_cast<unsigned>(mask)];
  host::meet(warp, false);
  return result;
}
inline std::uint32_t shuffle_xor(std::uint32_t value, int mask) { return exchange_words(value, mask); }

template <class T>
T& shared() {
  static_assert(std::is_trivial_v<T>, "shared memory is not initialised");
  return *reinterpret_cast<T*>(host::self().block->shared.data());
}

template <class T>
T load(const T* from) {
  return *from;
}
template <class T>
void store(T* to, T value) {
  *to = value;
}

template <class T>
void store_peer(T* to, T value) {
  if (host::delays()) {
    host::hold_back(to, &value, sizeof(T));
  } else {
    *to = value;
  }
}
template <class T>
T load_mailbox(const T* from) {
  return *from;
}

template <class Word>
void store_release(Word* to, Word value) {
  host::release_stores();
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
template <class Word>
Word load_acquire(const Word* from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
template <class Word>
void store_relaxed(Word* to, Word value) {
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
}
template <class Word>
Word load_relaxed(const Word* from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
inline std::uint32_t fetch_add(std::uint32_t* at, std::uint32_t value) {
  return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
}
inline bool compare_exchange(std::uint32_t* at, std::uint32_t expected, std::uint32_t value) {
  return __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

inline void flush() { host::release_stores(); }

inline std::uint64_t clock_ns() { return host::self().scheduler->clock_ns(); }
inline void pause() { host::self().scheduler->yield(); }
[[noreturn]] inline void trap() { throw host::Trapped{}; }

// What a table of kernels (kernel_entry.cuh) holds in a build for the host: each thread of a launch calls it.
template <class Kernel>
void entry(const void* args) {
  Kernel::run(*static_cast<const typename Kernel::Args*>(args));
}

}  // namespace fccl::cuda
