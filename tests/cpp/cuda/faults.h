// The faults that tests put into the protocol, by name: each must be found.
#pragma once

#include "cuda/protocol.h"

namespace fccl::cuda::host {

struct NoFlagWait : NoFaults {
  static constexpr bool kNoFlagWait = true;
};
struct RelaxedFlag : NoFaults {
  static constexpr bool kRelaxedFlag = true;
};
struct RelaxedWait : NoFaults {
  static constexpr bool kRelaxedWait = true;
};
struct NoSyncBeforeFlag : NoFaults {
  static constexpr bool kNoSyncBeforeFlag = true;
};
struct OneMailbox : NoFaults {
  static constexpr bool kOneMailbox = true;
};
struct PerBlockCounters : NoFaults {
  static constexpr bool kPerBlockCounters = true;
};

}  // namespace fccl::cuda::host
