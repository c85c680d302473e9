// The words in which fccl's CUDA kernels are written, and nothing else: no PTX, no cooperative groups and no
// CUDA header appear in a kernel. seam_device.cuh says them to the GPU, seam_host.h to fibres on a CPU,
// so the very same kernel runs in the tests: each thread of each block of each rank is a fibre there, resumed
// in random order, its stores to peers delayed as long as the memory model allows, or watched by
// ThreadSanitizer. That proves protocol and arithmetic; it does not prove what a GPU's memory or clock does.
//
// A kernel is a struct:
//
//   struct Kernel {
//     static constexpr int kThreads = 256;  // the most threads of a block
//     static constexpr int kBlocksPerMultiprocessor = 2;  // that fit at once, registers permitting
//     struct Args { … };                    // trivially copyable; const to the kernel
//     FCCL_KERNEL static void run(const Args& args);
//   };
//
// Both numbers are the compiler's budget of registers: 65536 by their product. Left to guess the second, it
// aims at more blocks than fit and spills a word here and there.
//
// Blocks and threads have one dimension. All threads of a block come to every sync(), and all lanes of a warp
// to every shuffle; nothing is said about the order of blocks.
//
//   block_index() block_count() thread_index() thread_count()
//   sync()                    all threads of the block; what one wrote before, all see after
//   sync_or(bool)             sync(), and whether any thread said true
//   shuffle_xor(word, mask)   the word of the lane whose number differs in the bits of `mask`
//   shared<T>()               the block's T, uninitialised; one such type per kernel
//   load(p) store(p, v)       memory that no other GPU touches meanwhile; 1, 2, 4, 8 or 16 bytes, aligned
//   store_peer(p, v)          memory that a peer will read; visible to it after a release
//   load_mailbox(p)           memory that a peer has written; after an acquire that saw its release
//   store_release(p, word) load_acquire(p)    order all the above across GPUs (system scope); 4 or 8 bytes
//   store_relaxed(p, word) load_relaxed(p)    order nothing; 4 or 8 bytes
//   fetch_add(p, word)        own GPU; acquire and release among its blocks
//   compare_exchange(p, expected, word)       own GPU: whether it was `expected` and is `word` now
//   flush()                   returns when what this thread has stored is where all GPUs and the host see it
//   clock_ns() pause() trap()                 time; once per turn of a spin; end the context with an error
//
// Two facts of the CUDA memory model carry the protocols: a release by one thread also covers what other
// threads of its block wrote before a sync() that all of them passed; an acquire by one thread covers what
// the others read after such a sync().
#pragma once

#include <cstdint>
#include <type_traits>

namespace fccl::cuda {

// The unit of memory traffic: one 128-bit access.
struct alignas(16) Vector {
  std::uint32_t word[4];
};

inline constexpr int kWarpSize = 32;

}  // namespace fccl::cuda

#if defined(__CUDACC__)
#include "cuda/seam_device.cuh"
#else
#include "cuda/seam_host.h"
#endif

namespace fccl::cuda {

// A grid's threads, numbered through: where this one begins, and how far it is to its next piece of work.
FCCL_KERNEL std::uint64_t first_thread() {
  return std::uint64_t{block_index()} * thread_count() + thread_index();
}
FCCL_KERNEL std::uint64_t threads_of_grid() { return std::uint64_t{block_count()} * thread_count(); }

}  // namespace fccl::cuda
