// Memory of the device, which other processes can map, and of the host, pinned.
#pragma once

#include <cstddef>
#include <functional>

#include "simulation.h"

namespace fccl::sim {

enum class Place { kHost, kPinned, kDevice };

// Says whose the memory at `address` is.
Place place_of(const void* address);

// A mapping that place_of() shall know.
void remember(void* address, std::size_t bytes, Place place, int descriptor = -1);
// Forgets it. Returns its size, or 0 if there is none that begins at `address`.
std::size_t forget(const void* address, int* descriptor = nullptr);

// Memory that can be mapped elsewhere: a descriptor, and a mapping of it.
int make_shareable(std::size_t bytes);
void* map_shareable(int descriptor, std::size_t bytes);

// How many there are, for tests that ask whether all has been given back.
struct Counts {
  long device = 0;    // allocations by cudaMalloc
  long pinned = 0;    // by cudaHostAlloc
  long handles = 0;   // of cuMemCreate and cuMemImport
  long mappings = 0;  // by cuMemMap
  long opened = 0;    // by cudaIpcOpenMemHandle
};
void count(long Counts::* what, long change);

}  // namespace fccl::sim
