# Finds torch by asking the interpreter that will import fccl. find_package(Torch) is not used: with
# a CUDA build of torch it insists on the whole CUDA toolkit, which fccl does not need.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import torch; from torch.utils.cpp_extension import include_paths, library_paths; print(torch.__version__); print(torch.version.cuda or ''); print('|'.join(include_paths())); print('|'.join(library_paths())); print(int(torch._C._GLIBCXX_USE_CXX11_ABI))
# The packages of CUDA libraries that pip installs with torch, each in a folder of the namespace package `nvidia`.
import glob, importlib.util
spec = importlib.util.find_spec('nvidia')
for kind in ('include', 'lib'):
    print('|'.join(sorted(path for root in (spec.submodule_search_locations if spec else []) for path in glob.glob(root + '/*/' + kind))) or '-')"
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
list(GET fccl_torch_facts 5 FCCL_TORCH_NVIDIA_INCLUDES)
list(GET fccl_torch_facts 6 FCCL_TORCH_NVIDIA_LIBDIRS)
string(REGEX REPLACE "^-$" "" FCCL_TORCH_NVIDIA_INCLUDES "${FCCL_TORCH_NVIDIA_INCLUDES}")
string(REGEX REPLACE "^-$" "" FCCL_TORCH_NVIDIA_LIBDIRS "${FCCL_TORCH_NVIDIA_LIBDIRS}")
string(REPLACE "|" ";" FCCL_TORCH_NVIDIA_INCLUDES "${FCCL_TORCH_NVIDIA_INCLUDES}")
string(REPLACE "|" ";" FCCL_TORCH_NVIDIA_LIBDIRS "${FCCL_TORCH_NVIDIA_LIBDIRS}")
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
# NO_CACHE: a build folder that is configured again for another torch must not keep the first one's libraries.
foreach(lib IN ITEMS torch torch_cpu c10 torch_python)
  find_library(fccl_lib_${lib} NAMES ${lib} PATHS ${fccl_torch_libdirs} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  target_link_libraries(fccl_torch INTERFACE ${fccl_lib_${lib}})
endforeach()
target_compile_definitions(fccl_torch INTERFACE USE_DISTRIBUTED _GLIBCXX_USE_CXX11_ABI=${fccl_torch_abi})
