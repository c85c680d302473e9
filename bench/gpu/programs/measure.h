// What measure_kernels measures. Rows go to standard output as "ROW | name | value | …" for check.sh's table.
#pragma once

namespace fccl::gpu_check {

// Every bucket and packing kernel, as bytes read and written over time, beside a copy of as many bytes in the
// same graph.
void measure_bandwidth(bool quick);
// A call of the communicating kernels with all ranks on one GPU: the floor that the protocol sets, not a
// link's.
void measure_latency(bool quick);

}  // namespace fccl::gpu_check
