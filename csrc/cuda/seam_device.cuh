// seam.h for the GPU: the one place with PTX.
#pragma once

#include <cstring>

#include "cuda/seam.h"

#define FCCL_KERNEL __device__ __forceinline__
#define FCCL_UNROLL _Pragma("unroll")
#define FCCL_NO_UNROLL _Pragma("unroll 1")

namespace fccl::cuda {

FCCL_KERNEL unsigned block_index() { return blockIdx.x; }
FCCL_KERNEL unsigned block_count() { return gridDim.x; }
FCCL_KERNEL unsigned thread_index() { return threadIdx.x; }
FCCL_KERNEL unsigned thread_count() { return blockDim.x; }

FCCL_KERNEL void sync() { __syncthreads(); }
FCCL_KERNEL bool sync_or(bool value) { return __syncthreads_or(value) != 0; }
FCCL_KERNEL std::uint32_t shuffle_xor(std::uint32_t value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

template <class T>
FCCL_KERNEL T& shared() {
  static_assert(std::is_trivial_v<T>, "shared memory is not initialised");
  __shared__ T storage;
  return storage;
}

template <class T>
FCCL_KERNEL T load(const T* from) {
  return *from;
}
template <class T>
FCCL_KERNEL void store(T* to, T value) {
  *to = value;
}

FCCL_KERNEL void store_peer(Vector* to, Vector v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}
FCCL_KERNEL void store_peer(std::uint64_t* to, std::uint64_t value) {
  asm volatile("st.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
// Strong loads, so that no line left in the first-level cache by an earlier launch can be seen.
FCCL_KERNEL Vector load_mailbox(const Vector* from) {
  Vector v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from)
               : "memory");
  return v;
}
FCCL_KERNEL std::uint64_t load_mailbox(const std::uint64_t* from) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

FCCL_KERNEL void store_release(std::uint32_t* to, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
FCCL_KERNEL void store_release(std::uint64_t* to, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
FCCL_KERNEL std::uint32_t load_acquire(const std::uint32_t* from) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
FCCL_KERNEL std::uint64_t load_acquire(const std::uint64_t* from) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
FCCL_KERNEL void store_relaxed(std::uint32_t* to, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
FCCL_KERNEL void store_relaxed(std::uint64_t* to, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
FCCL_KERNEL std::uint32_t load_relaxed(const std::uint32_t* from) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
FCCL_KERNEL std::uint64_t load_relaxed(const std::uint64_t* from) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
FCCL_KERNEL std::uint32_t fetch_add(std::uint32_t* at, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(at), "r"(value)
               : "memory");
  return before;
}
FCCL_KERNEL bool compare_exchange(std::uint32_t* at, std::uint32_t expected, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.cas.acq_rel.gpu.global.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(at), "r"(expected), "r"(value)
               : "memory");
  return before == expected;
}

FCCL_KERNEL void flush() { __threadfence_system(); }

FCCL_KERNEL std::uint64_t clock_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
FCCL_KERNEL void pause() {}
FCCL_KERNEL void trap() { asm volatile("trap;"); }

// The one entry. Args stay in constant memory: a kernel never writes to them.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerMultiprocessor)
    entry(const __grid_constant__ typename Kernel::Args args) {
  static_assert(std::is_trivially_copyable_v<typename Kernel::Args>);
  Kernel::run(args);
}

}  // namespace fccl::cuda
