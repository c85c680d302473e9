// Which kernels to use: the decision, apart from where its inputs come from, so that it can be tested.
#pragma once

#include <string>

#include "cpu/kernels/reduce.h"

namespace fccl::cpu {

struct IsaChoice {
  Isa isa;
  std::string warning;  // one line without a line end; empty if all is well
};

// `requested`: the value of FCCL_ISA, nullptr or empty if unset. `best`: the best set available.
IsaChoice choose_isa(const char* requested, Isa best);

}  // namespace fccl::cpu
