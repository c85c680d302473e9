// What torch imports and no test has needed yet: it says so, rather than have the real libcudart answer that
// there is no GPU. Declared without their parameters, which they do not look at, so no header of CUDA may be
// seen here.
extern "C" {
int fccl_sim_refuse(const char* name);
}

#define FCCL_SIM_REFUSED(name) \
  extern "C" __attribute__((visibility("default"))) int name() { return fccl_sim_refuse(#name); }

// ---- the runtime ----
FCCL_SIM_REFUSED(cudaDeviceGetDefaultMemPool)
FCCL_SIM_REFUSED(cudaDeviceGetGraphMemAttribute)
FCCL_SIM_REFUSED(cudaDeviceSetGraphMemAttribute)
FCCL_SIM_REFUSED(cudaFreeAsync)
FCCL_SIM_REFUSED(cudaMallocAsync)
FCCL_SIM_REFUSED(cudaMemPoolGetAttribute)
FCCL_SIM_REFUSED(cudaMemPoolSetAccess)
FCCL_SIM_REFUSED(cudaMemPoolSetAttribute)
FCCL_SIM_REFUSED(cudaMemPoolTrimTo)
FCCL_SIM_REFUSED(cudaGraphNodeGetDependencies)
FCCL_SIM_REFUSED(cudaFuncSetAttribute)
FCCL_SIM_REFUSED(cudaGetSymbolAddress)
FCCL_SIM_REFUSED(cudaGraphAddNode)
FCCL_SIM_REFUSED(cudaGraphConditionalHandleCreate)
FCCL_SIM_REFUSED(cudaGraphRetainUserObject)
FCCL_SIM_REFUSED(cudaHostRegister)
FCCL_SIM_REFUSED(cudaHostUnregister)
FCCL_SIM_REFUSED(cudaIpcGetEventHandle)
FCCL_SIM_REFUSED(cudaIpcOpenEventHandle)
FCCL_SIM_REFUSED(cudaKernelSetAttributeForDevice)
FCCL_SIM_REFUSED(cudaLaunchKernelExC)
FCCL_SIM_REFUSED(cudaLibraryGetKernel)
FCCL_SIM_REFUSED(cudaLibraryLoadData)
FCCL_SIM_REFUSED(cudaLibraryUnload)
FCCL_SIM_REFUSED(cudaMemcpyToSymbol)
FCCL_SIM_REFUSED(cudaMemset)
FCCL_SIM_REFUSED(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
FCCL_SIM_REFUSED(cudaStreamAddCallback)
FCCL_SIM_REFUSED(cudaStreamBeginCaptureToGraph)
FCCL_SIM_REFUSED(cudaStreamUpdateCaptureDependencies)
FCCL_SIM_REFUSED(cudaUserObjectCreate)
FCCL_SIM_REFUSED(cudaUserObjectRelease)
FCCL_SIM_REFUSED(cudaProfilerStart)
FCCL_SIM_REFUSED(cudaProfilerStop)
FCCL_SIM_REFUSED(cudaStreamCreate)

// ---- the driver, for libcaffe2_nvrtc ----
FCCL_SIM_REFUSED(cuCtxGetCurrent)
FCCL_SIM_REFUSED(cuCtxSetCurrent)
FCCL_SIM_REFUSED(cuDeviceGet)
FCCL_SIM_REFUSED(cuDevicePrimaryCtxRetain)
FCCL_SIM_REFUSED(cuFuncGetAttribute)
FCCL_SIM_REFUSED(cuFuncSetAttribute)
FCCL_SIM_REFUSED(cuFuncSetCacheConfig)
FCCL_SIM_REFUSED(cuLaunchCooperativeKernel)
FCCL_SIM_REFUSED(cuLaunchKernel)
FCCL_SIM_REFUSED(cuLinkAddData_v2)
FCCL_SIM_REFUSED(cuLinkComplete)
FCCL_SIM_REFUSED(cuLinkCreate_v2)
FCCL_SIM_REFUSED(cuModuleGetFunction)
FCCL_SIM_REFUSED(cuModuleLoad)
FCCL_SIM_REFUSED(cuModuleLoadData)
FCCL_SIM_REFUSED(cuModuleLoadDataEx)
FCCL_SIM_REFUSED(cuModuleUnload)
FCCL_SIM_REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
FCCL_SIM_REFUSED(cuPointerGetAttribute)
FCCL_SIM_REFUSED(cuTensorMapEncodeTiled)
