// A CUDA runtime and driver without a GPU, to be preloaded (LD_PRELOAD) into a process that uses CUDA: its
// functions are found before those of libcudart. Device memory is host memory that other processes can map;
// a stream is a thread that carries out what was put on it, in order and with random delays, so that a wait
// that somebody forgot shows as wrong data; a kernel of fccl's runs on fibres (tests/cpp/cuda/launcher.h).
//
// What torch or fccl calls and this has no answer for is an error, and says its name on stderr.
//
// Settings, from the environment:
//
// - FCCL_SIM_DEVICES=1: how many devices this process sees.
// - FCCL_SIM_FIRST_UUID=0: what tells the first of them from those of other processes; then come the next.
// - FCCL_SIM_DRIVER=13000: the driver's version.
// - FCCL_SIM_PEER_ACCESS=1; 0: no device reaches another.
// - FCCL_SIM_NVLINK=0; 1: they do so by NVLink.
// - FCCL_SIM_DESCRIPTORS=1; 0: memory cannot be exported by descriptor.
// - FCCL_SIM_SEED=1: of the delays, beside the first UUID; 0: no delays.
// - FCCL_SIM_FAIL=: "cuMemCreate=2,cudaLaunchKernel=719": these fail with these error numbers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#define FCCL_SIM_EXPORT extern "C" __attribute__((visibility("default")))

namespace fccl::sim {

// ---- settings.cpp ----
// Read when first asked for, since a process may be forked from one that was preloaded.
long setting(const char* name, long otherwise);

// ---- errors.cpp ----

// To be called first by whatever can fail: what was wished for by FCCL_SIM_FAIL or fail_next(), or the error
// that a kernel has left in the context. cudaSuccess if there is none.
cudaError_t trouble(const char* function);
// Remembers `error` as this thread's last, and returns it.
cudaError_t told(cudaError_t error);
cudaError_t& last_error();
// Of a kernel that trapped: every later call fails.
void break_context();
bool is_broken();
// Complains on stderr about what is not simulated.
cudaError_t not_simulated(const char* what);

// ---- log.cpp: what was asked of the device, a line each ----
void note(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- devices.cpp ----
int device_count();
int current_device();
// That the current device has a context from now on.
void use_device();
bool has_context(int device);

}  // namespace fccl::sim
