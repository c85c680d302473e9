// What it costs to hand a cache line from one core to another: of all that a machine is, this says most about
// how fast ranks on it can talk.
#pragma once

#include <optional>

namespace fccl::cpu {

struct Handover {
  double nearest_ns = 0;   // the closest pair of cores that was looked at
  double farthest_ns = 0;  // and the one furthest apart
};

// One way, in nanoseconds: two threads bounce a line to and fro, between the first usable core and up to
// `most_cores` - 1 others, spread evenly. Takes some milliseconds for each. Nothing if this process may use
// one core only, or if threads cannot be started or placed.
std::optional<Handover> measure_handover(int most_cores = 9);

}  // namespace fccl::cpu
