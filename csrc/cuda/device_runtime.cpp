#include "cuda/device_runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <mutex>

#include "cuda/device_driver_calls.h"
#include "cuda/kernels.h"

namespace fccl::cuda {
namespace {

bool has_context(int device) {
  const DriverCalls* const driver = DriverCalls::get();
  unsigned flags = 0;
  int active = 0;
  return driver != nullptr && driver->context_state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

// Makes a device the current one, for the calls that mean the current one. A thread that never chose a device
// has number 0, and to set that back would make a context on it, some hundred megabytes, where there was
// none.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess || before_ == device) return;
    changed_ = cudaSetDevice(device) == cudaSuccess;
  }
  ~OnDevice() {
    if (changed_ && has_context(before_)) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = -1;
  bool changed_ = false;
};

// Lets calls through that a capture elsewhere in the process would forbid, though they do not concern it.
class BesideCaptures {
 public:
  BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

cudaStream_t native(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t native_event(EventHandle event) { return static_cast<cudaEvent_t>(event); }
CUdeviceptr address(const std::byte* data) { return reinterpret_cast<CUdeviceptr>(data); }

class DeviceRuntime final : public Runtime {
 public:
  explicit DeviceRuntime(int device) : device_(device) {}
  ~DeviceRuntime() override {
    const OnDevice on(device_);
    if (own_stream_ != nullptr) cudaStreamDestroy(own_stream_);
  }

  DeviceFacts facts() override {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
    DeviceFacts facts;
    static_assert(sizeof(properties.uuid) == sizeof(facts.uuid));
    std::memcpy(facts.uuid.data(), &properties.uuid, sizeof(properties.uuid));
    facts.architecture = properties.major * 10 + properties.minor;
    facts.sm_count = properties.multiProcessorCount;
    check(cudaDriverGetVersion(&facts.driver), "cudaDriverGetVersion");
    return facts;
  }

  Link link_to(const std::array<unsigned char, 16>& peer_uuid) override {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    for (int peer = 0; peer < count; ++peer) {
      cudaDeviceProp properties{};
      check(cudaGetDeviceProperties(&properties, peer), "cudaGetDeviceProperties");
      if (std::memcmp(&properties.uuid, peer_uuid.data(), peer_uuid.size()) != 0) continue;
      int reaches = 0;
      check(cudaDeviceCanAccessPeer(&reaches, device_, peer), "cudaDeviceCanAccessPeer");
      if (reaches == 0) return Link::kNone;
      // What NVLink has and PCIe has not.
      int atomics = 0;
      check(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device_, peer),
            "cudaDeviceGetP2PAttribute");
      return atomics != 0 ? Link::kNvlink : Link::kPcie;
    }
    // Hidden from this process (CUDA_VISIBLE_DEVICES): the driver may map its memory all the same, and says
    // nothing of the way there.
    return Link::kPcie;
  }

  Shared allocate_shared(std::size_t bytes) override {
    const OnDevice on(device_);
    const BesideCaptures beside;
    const std::lock_guard lock(mutex_);
    Shared shared = exports_descriptors() ? allocate_by_descriptor(bytes) : allocate_by_handle(bytes);
    try {
      check(cudaMemsetAsync(shared.data, 0, bytes, own_stream()), "cudaMemsetAsync");
      check(cudaStreamSynchronize(own_stream()), "cudaStreamSynchronize");
    } catch (...) {
      free_shared(shared);
      throw;
    }
    return shared;
  }

  void free_shared(const Shared& memory) noexcept override {
    const OnDevice on(device_);
    if (memory.how.kind == Export::Kind::kDescriptor) {
      unmap(memory.data, memory.how.bytes);
    } else {
      cudaFree(memory.data);
    }
  }

  std::byte* map_peer(const Export& how, const Descriptor& descriptor) override {
    const OnDevice on(device_);
    if (how.kind == Export::Kind::kDescriptor) {
      const DriverCalls& driver = *DriverCalls::get();
      CUmemGenericAllocationHandle handle{};
      driver.check(
          driver.import_handle(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor.get())),
                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
          "cuMemImportFromShareableHandle");
      return map(handle, how.bytes);
    }
    cudaIpcMemHandle_t handle{};
    static_assert(sizeof(handle) == sizeof(how.ipc_handle));
    std::memcpy(&handle, how.ipc_handle.data(), sizeof(handle));
    void* data = nullptr;
    check(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    return static_cast<std::byte*>(data);
  }

  void unmap_peer(const Export& how, std::byte* data) noexcept override {
    const OnDevice on(device_);
    if (how.kind == Export::Kind::kDescriptor) {
      unmap(data, how.bytes);
    } else {
      cudaIpcCloseMemHandle(data);
    }
  }

  void* allocate_host(std::size_t bytes) override {
    const OnDevice on(device_);
    const BesideCaptures beside;
    void* data = nullptr;
    check(cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    return std::memset(data, 0, bytes);
  }
  void free_host(void* data) noexcept override {
    const OnDevice on(device_);
    cudaFreeHost(data);
  }

  EventHandle make_event() override {
    const OnDevice on(device_);
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
  }
  void destroy_event(EventHandle event) noexcept override {
    const OnDevice on(device_);
    cudaEventDestroy(native_event(event));
  }
  void record(EventHandle event, StreamHandle stream) override {
    const OnDevice on(device_);
    check(cudaEventRecord(native_event(event), native(stream)), "cudaEventRecord");
  }
  void wait(StreamHandle stream, EventHandle event) override {
    const OnDevice on(device_);
    check(cudaStreamWaitEvent(native(stream), native_event(event), 0), "cudaStreamWaitEvent");
  }

  bool done(EventHandle event) noexcept override {
    const OnDevice on(device_);
    const BesideCaptures beside;
    const cudaError_t result = cudaEventQuery(native_event(event));
    if (result != cudaSuccess && result != cudaErrorNotReady) cudaGetLastError();
    return result != cudaErrorNotReady;
  }

  std::uint64_t capture_of(StreamHandle stream) override {
    const OnDevice on(device_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    const cudaError_t result = cudaStreamGetCaptureInfo(native(stream), &status, &id);
    if (result == cudaErrorStreamCaptureImplicit) {  // the legacy stream, while another is being captured
      cudaGetLastError();
      return 0;
    }
    check(result, "cudaStreamGetCaptureInfo");
    return status == cudaStreamCaptureStatusActive ? id : 0;
  }

  void launch(const LaunchPlan& plan, const void* args, StreamHandle stream) override {
    const OnDevice on(device_);
    const KernelEntry kernel = find_kernel(plan.algorithm, plan.element);
    if (kernel.entry == nullptr) {
      throw Error(ErrorKind::kSystem, std::string("no ") + name_of(plan.algorithm) + " kernel for " +
                                          fccl::name_of(plan.element));
    }
    launch(kernel, plan.blocks, plan.threads, args, stream);
  }

  void launch(const BucketLaunch& pass, const void* args, StreamHandle stream) override {
    const OnDevice on(device_);
    const KernelEntry kernel = find_kernel(pass.kernel, pass.gradients, pass.code, pass.block);
    if (kernel.entry == nullptr) {
      throw Error(ErrorKind::kSystem, std::string("no kernel of this build codes buckets of ") +
                                          fccl::name_of(pass.gradients) + " in blocks of " +
                                          std::to_string(pass.block));
    }
    launch(kernel, pass.blocks, pass.threads, args, stream);
  }

  void load_kernels() override {
    const OnDevice on(device_);
    for (const void* const entry : collective_entries()) {
      cudaFuncAttributes attributes{};
      check(cudaFuncGetAttributes(&attributes, entry), "cudaFuncGetAttributes");
    }
  }

  void poke(std::uint32_t* at, std::uint32_t value) override {
    const OnDevice on(device_);
    const BesideCaptures beside;
    const std::lock_guard lock(mutex_);
    check(cudaMemcpyAsync(at, &value, sizeof(value), cudaMemcpyHostToDevice, own_stream()),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(own_stream()), "cudaStreamSynchronize");
  }

 private:
  // With the device made the current one.
  static void launch(const KernelEntry& kernel, unsigned blocks, unsigned threads, const void* args,
                     StreamHandle stream) {
    void* parameters[] = {const_cast<void*>(args)};
    check(cudaLaunchKernel(kernel.entry, dim3(blocks), dim3(threads), parameters, 0, native(stream)),
          "cudaLaunchKernel");
  }

  // Waits for no kernel, and no kernel waits for it. With mutex_ held.
  cudaStream_t own_stream() {
    if (own_stream_ == nullptr)
      check(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    return own_stream_;
  }

  bool exports_descriptors() const {
    const DriverCalls* const driver = DriverCalls::get();
    if (driver == nullptr) return false;
    for (const CUdevice_attribute attribute :
         {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED}) {
      int value = 0;
      if (driver->device_attribute(&value, attribute, device_) != CUDA_SUCCESS || value == 0) return false;
    }
    return true;
  }

  Shared allocate_by_descriptor(std::size_t bytes) const {
    const DriverCalls& driver = *DriverCalls::get();
    CUmemAllocationProp property{};
    property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    property.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    property.location.id = device_;
    std::size_t granularity = 0;
    driver.check(driver.granularity(&granularity, &property, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                 "cuMemGetAllocationGranularity");
    Shared shared;
    shared.how.kind = Export::Kind::kDescriptor;
    shared.how.bytes = (bytes + granularity - 1) / granularity * granularity;
    CUmemGenericAllocationHandle handle{};
    driver.check(driver.create(&handle, shared.how.bytes, &property, 0), "cuMemCreate");
    int fd = -1;
    const CUresult exported = driver.export_handle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (exported != CUDA_SUCCESS) driver.release(handle);
    driver.check(exported, "cuMemExportToShareableHandle");
    shared.descriptor = Descriptor(fd);
    shared.data = map(handle, shared.how.bytes);
    return shared;
  }

  // Takes the handle over: the mapping keeps the memory.
  std::byte* map(CUmemGenericAllocationHandle handle, std::size_t bytes) const {
    const DriverCalls& driver = *DriverCalls::get();
    CUdeviceptr data = 0;
    const CUresult reserved = driver.reserve(&data, bytes, 0, 0, 0);
    const CUresult mapped = reserved == CUDA_SUCCESS ? driver.map(data, bytes, 0, handle, 0) : reserved;
    driver.release(handle);
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device_;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const CUresult allowed = mapped == CUDA_SUCCESS ? driver.set_access(data, bytes, &access, 1) : mapped;
    if (allowed == CUDA_SUCCESS) return reinterpret_cast<std::byte*>(data);
    if (mapped == CUDA_SUCCESS) driver.unmap(data, bytes);
    if (reserved == CUDA_SUCCESS) driver.free_address(data, bytes);
    driver.check(reserved, "cuMemAddressReserve");
    driver.check(mapped, "cuMemMap");
    driver.check(allowed, "cuMemSetAccess");
    return nullptr;
  }

  static void unmap(const std::byte* data, std::size_t bytes) noexcept {
    const DriverCalls& driver = *DriverCalls::get();
    driver.unmap(address(data), bytes);
    driver.free_address(address(data), bytes);
  }

  static Shared allocate_by_handle(std::size_t bytes) {
    Shared shared;
    void* data = nullptr;
    check(cudaMalloc(&data, bytes), "cudaMalloc");
    cudaIpcMemHandle_t handle{};
    const cudaError_t got = cudaIpcGetMemHandle(&handle, data);
    if (got != cudaSuccess) cudaFree(data);
    check(got, "cudaIpcGetMemHandle");
    shared.data = static_cast<std::byte*>(data);
    shared.how.kind = Export::Kind::kIpcHandle;
    shared.how.bytes = bytes;
    std::memcpy(shared.how.ipc_handle.data(), &handle, sizeof(handle));
    return shared;
  }

  const int device_;
  std::mutex mutex_;
  cudaStream_t own_stream_ = nullptr;
};

}  // namespace

std::shared_ptr<Runtime> make_device_runtime(int device) { return std::make_shared<DeviceRuntime>(device); }

}  // namespace fccl::cuda
