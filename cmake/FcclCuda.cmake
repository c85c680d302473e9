# FCCL_CUDA=AUTO|ON|OFF. The kernels of csrc/cuda come in a later release; the option is here from
# the start so that build scripts need not change, and ON says clearly what it cannot do yet.
set(FCCL_CUDA_ENABLED OFF)
if(FCCL_CUDA STREQUAL "ON")
  message(FATAL_ERROR
    "FCCL_CUDA=ON: this release has no CUDA kernels. CUDA tensors go to NCCL through torch without "
    "them; use FCCL_CUDA=AUTO or OFF.")
elseif(NOT FCCL_CUDA MATCHES "^(AUTO|OFF)$")
  message(FATAL_ERROR "FCCL_CUDA=${FCCL_CUDA}: expected AUTO, ON or OFF")
endif()
