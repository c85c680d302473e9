# Included by csrc/CMakeLists.txt: adds the reduction kernels to fccl_engine, one unit per
# instruction set, each with its own flags.
target_sources(fccl_engine PRIVATE
  ${CMAKE_CURRENT_LIST_DIR}/dispatch.cpp
  ${CMAKE_CURRENT_LIST_DIR}/kernels_portable.cpp)

# No exceptions, no runtime support: the kernel units are to define nothing but their table, see
# reduce_kernels.inc.h (the C++ tests check it).
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/kernels_portable.cpp
  TARGET_DIRECTORY fccl_engine
  PROPERTIES COMPILE_OPTIONS "-fno-exceptions")

# Ask the compiler, not CMAKE_SYSTEM_PROCESSOR: that one is wrong under -m32 and in many containers.
include(CheckCXXSymbolExists)
check_cxx_symbol_exists(__x86_64__ "" FCCL_TARGET_IS_X86_64)
if(FCCL_TARGET_IS_X86_64)
  target_sources(fccl_engine PRIVATE
    ${CMAKE_CURRENT_LIST_DIR}/kernels_avx2.cpp
    ${CMAKE_CURRENT_LIST_DIR}/kernels_avx512.cpp)
  # FMA is left out on purpose: a fused multiply-add would round differently from the other sets.
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/kernels_avx2.cpp
    TARGET_DIRECTORY fccl_engine
    PROPERTIES COMPILE_OPTIONS "-fno-exceptions;-mavx2;-mf16c")
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/kernels_avx512.cpp
    TARGET_DIRECTORY fccl_engine
    PROPERTIES COMPILE_OPTIONS 
      "-fno-exceptions;-mavx2;-mf16c;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mprefer-vector-width=512")
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/dispatch.cpp
    TARGET_DIRECTORY fccl_engine
    PROPERTIES COMPILE_DEFINITIONS FCCL_X86_KERNELS)
endif()
