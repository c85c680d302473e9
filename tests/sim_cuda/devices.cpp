// Devices and what they say of themselves.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "simulation.h"

namespace fccl::sim {
namespace {

constexpr int kMostDevices = 16;
std::atomic<bool> contexts[kMostDevices];
thread_local int current = 0;

bool exists(int device) { return device >= 0 && device < device_count(); }

}  // namespace

int device_count() { return static_cast<int>(std::min<long>(setting("FCCL_SIM_DEVICES", 1), kMostDevices)); }
int current_device() { return current; }
void use_device() { contexts[current] = true; }
bool has_context(int device) { return exists(device) && contexts[device]; }

}  // namespace fccl::sim

using namespace fccl::sim;

FCCL_SIM_EXPORT int fccl_sim_has_context(int device) { return has_context(device) ? 1 : 0; }

FCCL_SIM_EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count > 0 ? cudaSuccess : told(cudaErrorNoDevice);
}
FCCL_SIM_EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaSetDevice(int device) {
  if (const auto error = trouble("cudaSetDevice")) return told(error);
  if (!exists(device)) return told(cudaErrorInvalidDevice);
  current = device;
  use_device();
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = static_cast<int>(setting("FCCL_SIM_DRIVER", 13000));
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* to, int device) {
  if (const auto error = trouble("cudaGetDeviceProperties")) return told(error);
  if (!exists(device)) return told(cudaErrorInvalidDevice);
  *to = {};
  std::snprintf(to->name, sizeof(to->name), "Simulated GPU");
  const long number = setting("FCCL_SIM_FIRST_UUID", 0) + device;
  std::memcpy(to->uuid.bytes, &number, sizeof(number));
  to->uuid.bytes[15] = 0x5f;
  to->major = 9;
  to->minor = 0;
  to->multiProcessorCount = 8;  // few, as every thread of the grid becomes a fibre
  to->totalGlobalMem = std::size_t{8} << 30;
  to->warpSize = 32;
  to->maxThreadsPerBlock = 1024;
  to->maxThreadsPerMultiProcessor = 2048;
  to->regsPerBlock = 65536;
  to->sharedMemPerBlock = 48 << 10;
  to->unifiedAddressing = 1;
  for (const int i : {0, 1, 2}) to->maxGridSize[i] = i == 0 ? 0x7fffffff : 65535;
  for (const int i : {0, 1, 2}) to->maxThreadsDim[i] = i == 2 ? 64 : 1024;
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!exists(device)) return told(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 8; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

FCCL_SIM_EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (const auto error = trouble("cudaDeviceCanAccessPeer")) return told(error);
  if (!exists(device) || !exists(peer)) return told(cudaErrorInvalidDevice);
  *can = device != peer && setting("FCCL_SIM_PEER_ACCESS", 1) != 0 ? 1 : 0;
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int device,
                                                      int peer) {
  if (!exists(device) || !exists(peer)) return told(cudaErrorInvalidDevice);
  if (attribute != cudaDevP2PAttrNativeAtomicSupported)
    return not_simulated("an attribute of cudaDeviceGetP2PAttribute");
  *value = static_cast<int>(setting("FCCL_SIM_NVLINK", 0));
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
FCCL_SIM_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaDeviceGetPCIBusId(char* to, int size, int device) {
  std::snprintf(to, static_cast<std::size_t>(size), "0000:%02x:00.0", device);
  return cudaSuccess;
}
