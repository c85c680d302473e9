// The kernels for AVX-512 F, BW, DQ and VL. Compiled with their flags: see reduce_kernels.inc.h on linkage.
// AVX512_BF16's conversion is not used: it takes subnormals for zero.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace fccl::cpu {
namespace {

template <class Floats, class Halves>
inline __attribute__((always_inline)) Floats half_to_float(Halves halves) {
  // The forms without a mask make GCC 12 warn of an uninitialised variable in its own header.
  return __builtin_bit_cast(Floats, _mm512_maskz_cvtph_ps(0xffff, __builtin_bit_cast(__m256i, halves)));
}
template <class Halves, class Floats>
inline __attribute__((always_inline)) Halves float_to_half(Floats floats) {
  return __builtin_bit_cast(
      Halves, _mm512_maskz_cvtps_ph(0xffff, __builtin_bit_cast(__m512, floats), _MM_FROUND_TO_NEAREST_INT));
}

// Tails of any length; see load_tail(). A masked-out byte is neither read nor written.
template <class V>
inline __attribute__((always_inline)) bool masked_load(const char* from, std::size_t bytes, V& value) {
  if constexpr (sizeof(V) == 64) {
    value = __builtin_bit_cast(V, _mm512_maskz_loadu_epi8((std::uint64_t{1} << bytes) - 1, from));
  } else {
    static_assert(sizeof(V) == 32);
    value = __builtin_bit_cast(V, _mm256_maskz_loadu_epi8((std::uint32_t{1} << bytes) - 1, from));
  }
  return true;
}
template <class V>
inline __attribute__((always_inline)) bool masked_store(char* to, std::size_t bytes, V value) {
  if constexpr (sizeof(V) == 64) {
    _mm512_mask_storeu_epi8(to, (std::uint64_t{1} << bytes) - 1, __builtin_bit_cast(__m512i, value));
  } else {
    static_assert(sizeof(V) == 32);
    _mm256_mask_storeu_epi8(to, (std::uint32_t{1} << bytes) - 1, __builtin_bit_cast(__m256i, value));
  }
  return true;
}

}  // namespace
}  // namespace fccl::cpu

#define FCCL_VECTOR_BYTES 64
#define FCCL_MASKED_TAILS
#define FCCL_HARDWARE_HALF
#include "cpu/kernels/reduce_kernels.inc.h"

namespace fccl::cpu {
constinit const KernelTable kAvx512Kernels = make_table();
}  // namespace fccl::cpu
