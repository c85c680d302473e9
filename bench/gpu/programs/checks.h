// What check_kernels can check. Each runs cases on the machine and compares them with the CPU.
#pragma once

#include <cstdint>

#include "machine.h"
#include "report.h"

namespace fccl::gpu_check {

struct Effort {
  bool small = false;      // few and small cases: for compute-sanitizer, which slows kernels a hundredfold
  std::uint64_t seed = 1;  // of all data
  double timeout_s = 10;   // how long a communicating kernel waits for its peers
};

// EncodeBucket, ReduceShard and DecodeBucket against cpu/bucket_coder.h, to the bit.
void check_buckets(Machine& machine, const Effort& effort, Report& report);
// PackTensors and UnpackTensors against a plain loop, to the bit.
void check_pack(Machine& machine, const Effort& effort, Report& report);
// The communicating kernels, ranks being streams of this process, against a plain loop in rank order.
void check_collectives(Machine& machine, const Effort& effort, Report& report);

}  // namespace fccl::gpu_check
