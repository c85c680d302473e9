// The kernels for any machine: 128-bit vectors, which are SSE2 on every x86-64 and NEON on every
// AArch64; compilers break them up elsewhere.
#if defined(__aarch64__)
#include <arm_neon.h>

namespace fccl::cpu {
namespace {

// Every AArch64 converts float16 in hardware, rounding to nearest even as codec/float16.h promises.
template <class Floats, class Halves>
inline __attribute__((always_inline)) Floats half_to_float(Halves halves) {
  return __builtin_bit_cast(Floats, vcvt_f32_f16(__builtin_bit_cast(float16x4_t, halves)));
}
template <class Halves, class Floats>
inline __attribute__((always_inline)) Halves float_to_half(Floats floats) {
  return __builtin_bit_cast(Halves, vcvt_f16_f32(__builtin_bit_cast(float32x4_t, floats)));
}

}  // namespace
}  // namespace fccl::cpu
#define FCCL_HARDWARE_HALF
#endif

#define FCCL_VECTOR_BYTES 16
#include "cpu/kernels/reduce_kernels.inc.h"

namespace fccl::cpu {
constinit const KernelTable kPortableKernels = make_table();
}  // namespace fccl::cpu
