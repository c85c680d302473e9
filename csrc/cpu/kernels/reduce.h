// Reduction of several sources into one result: the only arithmetic of the engine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace fccl::cpu {

// Reduces sources[0 .. source_count-1] element by element, in that order, into `out`, and into
// `copy` as well if it is not null (a second destination spares a pass over memory).
//
//   out[i] = round(finish(sources[0][i] op sources[1][i] op …))
//
// The accumulator is float for float16, bfloat16 and float32, double for float64 and exact for
// integers; there is one rounding to the dtype at the end, so neither chunking nor the instruction
// set shows in the result. kAvg divides the accumulator by `divisor` (integers: a wide sum, then
// truncation toward zero; what does not fit, which takes a divisor below source_count, wraps). Bool:
// any byte but 0 is true, sum is OR, product is AND, and results are 0 or 1. Min and max propagate
// NaN and keep the first of equal values (of -0 and +0, too). Integer sums and products wrap.
//
// Results are equal to the bit on every instruction set, AArch64 included: every NaN that comes out
// is the quiet, positive one without payload (0x7fc00000, 0x7ff8000000000000, 0x7e00, 0x7fc0), which
// hides what instruction sets do differently. Subnormals are kept unless the calling thread has told
// its CPU to flush them (torch.set_flush_denormal).
//
// `out` and `copy` may each be one of the sources, exactly; other overlaps are not allowed. No
// alignment is needed. source_count >= 1 and divisor >= 1; with one source the result is that source,
// finished. Nothing beyond `count` elements is read or written.
using ReduceFunction = void (*)(void* out, void* copy, const void* const* sources, int source_count,
                                std::size_t count, int divisor);

// The kernel for this machine, or nullptr if can_reduce(dtype, op) is false. Thread-safe.
ReduceFunction find_reduce(DType dtype, ReduceOp op) noexcept;

// Instruction sets a kernel table exists for, best last.
enum class Isa : std::uint8_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };
const char* name_of(Isa isa) noexcept;
// The best set that this build holds, this CPU and operating system run, and the environment
// variable FCCL_ISA (portable, avx2 or avx512; read once) does not rule out.
Isa selected_isa() noexcept;
bool isa_available(Isa isa) noexcept;
// As find_reduce, for one instruction set; nullptr if it is not available. For tests and benchmarks.
ReduceFunction find_reduce(Isa isa, DType dtype, ReduceOp op) noexcept;

}  // namespace fccl::cpu
