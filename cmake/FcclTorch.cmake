# Finds torch by asking the interpreter that will import fccl. find_package(Torch) is not used: with
# a CUDA build of torch it insists on the whole CUDA toolkit, which fccl does not need.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import torch; from torch.utils.cpp_extension import include_paths, library_paths; print(torch.__version__); print(torch.version.cuda or ''); print('|'.join(include_paths())); print('|'.join(library_paths())); print(int(torch._C._GLIBCXX_USE_CXX11_ABI))"
  OUTPUT_VARIABLE fccl_torch_facts
  ERROR_VARIABLE fccl_torch_error
  RESULT_VARIABLE fccl_torch_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT fccl_torch_result EQUAL 0)
  message(FATAL_ERROR
    "fccl is built against the torch that will load it, and ${Python_EXECUTABLE} cannot import torch.\n"
    "Install torch first, then: pip install --no-build-isolation .\n${fccl_torch_error}")
endif()
string(REPLACE "\n" ";" fccl_torch_facts "${fccl_torch_facts}")
list(GET fccl_torch_facts 0 FCCL_TORCH_VERSION)
list(GET fccl_torch_facts 1 FCCL_TORCH_CUDA)
list(GET fccl_torch_facts 2 fccl_torch_includes)
list(GET fccl_torch_facts 3 fccl_torch_libdirs)
list(GET fccl_torch_facts 4 fccl_torch_abi)
string(REPLACE "|" ";" fccl_torch_includes "${fccl_torch_includes}")
string(REPLACE "|" ";" fccl_torch_libdirs "${fccl_torch_libdirs}")
list(GET fccl_torch_includes 0 fccl_torch_include)
message(STATUS "fccl: torch ${FCCL_TORCH_VERSION} (CUDA: '${FCCL_TORCH_CUDA}') in ${fccl_torch_include}")

# torch bundles its own pybind11, and types bind across modules only where both have the same internals
# version. So torch's copy is the one compiled against, and no other is asked for.
if(NOT EXISTS ${fccl_torch_include}/pybind11/pybind11.h)
  message(FATAL_ERROR "no pybind11 among torch's headers in ${fccl_torch_include}: is this torch complete?")
endif()

add_library(fccl_torch INTERFACE)
target_include_directories(fccl_torch SYSTEM INTERFACE ${fccl_torch_includes})
foreach(lib IN ITEMS torch torch_cpu c10 torch_python)
  find_library(fccl_lib_${lib} NAMES ${lib} PATHS ${fccl_torch_libdirs} NO_DEFAULT_PATH REQUIRED)
  target_link_libraries(fccl_torch INTERFACE ${fccl_lib_${lib}})
endforeach()
target_compile_definitions(fccl_torch INTERFACE USE_DISTRIBUTED _GLIBCXX_USE_CXX11_ABI=${fccl_torch_abi})
