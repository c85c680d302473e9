// The kernels of one instruction set. Private to csrc/cpu/kernels.
#pragma once

#include "cpu/kernels/block_code.h"
#include "cpu/kernels/reduce.h"

namespace fccl::cpu {

struct KernelTable {
  ReduceFunction entry[kDTypeCount][kReduceOpCount];  // nullptr where can_reduce() is false
  BlockKernels blocks[codec::kBlockFormatCount];
};

// Constant-initialised: reading a table runs no code of its unit. The last two exist in x86-64
// builds only (FCCL_X86_KERNELS).
extern const KernelTable kPortableKernels;
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;

}  // namespace fccl::cpu
