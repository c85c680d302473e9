// Compressing gradients: the arithmetic of codec/block.h over whole runs of blocks.
//
// A run is a number of consecutive blocks of one format. Its codes lie in slots of `block` codes, one slot
// after the other; its scales, one per block, beside them (formats without scales take nullptr). `count` is
// the run's number of elements: only the last block may be short, and what it leaves of its slot is zero.
//
// The results are those of codec/block.h to the bit, on every instruction set. No alignment is needed of
// anything. Apart from the slots, nothing beyond `count` elements is read or written.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/block.h"
#include "cpu/kernels/reduce.h"

namespace fccl::cpu {

// The most elements of a block.
inline constexpr std::uint32_t kLargestBlock = 1024;

// Encodes `values`. With `remainder` (error feedback), values + remainder is encoded and the remainder
// becomes what the codes do not say; a block of nothing but zeros is sent as zeros and keeps its remainder.
using EncodeFunction = void (*)(const float* values, float* remainder, std::size_t count, std::uint32_t block,
                                void* codes, void* scales);

// A run that came from another rank. No alignment.
struct CodedRun {
  const void* codes;
  const void* scales;
};

// Decodes the runs, adds them up in their order in float32, divides by `divisor` and encodes the mean. What
// its codes do not say is added to `remainder` (nullptr: nobody wants it), `divisor` times. Where the run
// sources[own] has a block of zeros, and another run has not, the remainder that waited is added to the sum.
using MeanFunction = void (*)(const CodedRun* sources, int source_count, int own, std::size_t count,
                              std::uint32_t block, int divisor, float* remainder, void* codes, void* scales);

using DecodeFunction = void (*)(CodedRun source, std::size_t count, std::uint32_t block, float* values);

struct BlockKernels {
  EncodeFunction encode;
  MeanFunction mean;
  DecodeFunction decode;
};

// For this machine. Thread-safe. `block`s are multiples of 64 up to kLargestBlock.
const BlockKernels& block_kernels(codec::BlockFormat format) noexcept;
// For one instruction set; nullptr if it is not available. For tests and benchmarks.
const BlockKernels* block_kernels(Isa isa, codec::BlockFormat format) noexcept;

}  // namespace fccl::cpu
