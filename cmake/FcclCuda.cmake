# What csrc/cuda/ is built with, where FcclCudaChoice.cmake has decided that it is. Makes
#
#   fccl_cudart      the CUDA runtime: headers and the library
#   fccl_torch_cuda  torch's CUDA part, for sources that use it
include(${PROJECT_SOURCE_DIR}/cmake/FcclCudaChoice.cmake)
if(NOT FCCL_CUDA_ENABLED)
  return()
endif()

set(CMAKE_CUDA_COMPILER ${FCCL_NVCC})
set(CMAKE_CUDA_ARCHITECTURES ${FCCL_CUDA_ARCHITECTURES})  # without, CMake cannot even test an nvcc 13
# One host compiler for both languages: what they share are C++ objects.
if(NOT CMAKE_CUDA_HOST_COMPILER AND "$ENV{CUDAHOSTCXX}" STREQUAL "")
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
# The runtime is named below; CMake would put its own choice, or the driver's stub, on the link line.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
if(FCCL_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${FCCL_CCACHE})
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 does not know that nvcc has it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

# The runtime is the shared library that torch itself loads, found where torch's packages have it (or in the
# toolkit, for a torch that was built from source). Not the static one: a second runtime in one process
# has its own last error and its own idea of the current device, and a mistake of one is not seen by the other.
# And no RPATH, nor libcuda: torch has loaded libcudart when fccl._C is imported, and libcuda.so.1 is absent
# where there is no driver, so that linking to it would make the import fail there.
find_library(FCCL_CUDART NAMES libcudart.so.${FCCL_NVCC_MAJOR} NO_CACHE
  PATHS ${FCCL_TORCH_NVIDIA_LIBDIRS} ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} NO_DEFAULT_PATH)
if(NOT FCCL_CUDART)
  message(FATAL_ERROR
    "There is no libcudart.so.${FCCL_NVCC_MAJOR} in torch's CUDA packages (${FCCL_TORCH_NVIDIA_LIBDIRS}) nor in the "
    "toolkit (${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES}). Install nvidia-cuda-runtime, or build with FCCL_CUDA=OFF.")
endif()
add_library(fccl_cudart INTERFACE)
target_include_directories(fccl_cudart SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(fccl_cudart INTERFACE ${FCCL_CUDART})

# ATen's CUDA headers want cuBLAS and others, which a toolkit may lack and torch's packages bring. Those come last:
# their runtime headers are incomplete (no crt/).
add_library(fccl_torch_cuda INTERFACE)
target_link_libraries(fccl_torch_cuda INTERFACE fccl_torch fccl_cudart)
target_include_directories(fccl_torch_cuda SYSTEM INTERFACE
  ${fccl_torch_includes} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} ${FCCL_TORCH_NVIDIA_INCLUDES})
foreach(lib IN ITEMS torch_cuda c10_cuda)
  find_library(fccl_lib_${lib} NAMES ${lib} PATHS ${fccl_torch_libdirs} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  target_link_libraries(fccl_torch_cuda INTERFACE ${fccl_lib_${lib}})
endforeach()

list(JOIN FCCL_CUDA_ARCHITECTURES " " FCCL_CUDA_ARCHITECTURES_TEXT)
string(REGEX REPLACE "-(real|virtual)" "" FCCL_CUDA_ARCHITECTURES_TEXT "${FCCL_CUDA_ARCHITECTURES_TEXT}")
message(STATUS "fccl: CUDA kernels by nvcc ${FCCL_NVCC_VERSION} for ${FCCL_CUDA_ARCHITECTURES_TEXT}; ${FCCL_CUDART}")
