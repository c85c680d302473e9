// Tensors whose memory is in the process's arena, where peers can reach it.
#pragma once

#include <string>

#include <ATen/ATen.h>

namespace fccl::c10d_backend {

// An uninitialised CPU tensor. Its storage may be resized and freed like any other. Where the arena has no
// memory for it, it is an ordinary tensor, and the user is warned once: collectives on it copy. `owner` is
// for the statistics.
at::Tensor arena_empty(at::IntArrayRef sizes, at::ScalarType dtype, const std::string& owner);

}  // namespace fccl::c10d_backend
