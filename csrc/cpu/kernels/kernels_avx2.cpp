// The kernels for AVX2 and F16C. Compiled with their flags: see reduce_kernels.inc.h on linkage.
#include <immintrin.h>

#include <cstddef>

namespace fccl::cpu {
namespace {

// F16C rounds to nearest even and ignores the flush-to-zero mode, both as codec/float16.h promises.
template <class Floats, class Halves>
inline __attribute__((always_inline)) Floats half_to_float(Halves halves) {
  return __builtin_bit_cast(Floats, _mm256_cvtph_ps(__builtin_bit_cast(__m128i, halves)));
}
template <class Halves, class Floats>
inline __attribute__((always_inline)) Halves float_to_half(Floats floats) {
  return __builtin_bit_cast(Halves,
                            _mm256_cvtps_ph(__builtin_bit_cast(__m256, floats), _MM_FROUND_TO_NEAREST_INT));
}

// Tails in whole 32-bit words, which is what AVX2 has masks for; see load_tail().
inline __attribute__((always_inline)) __m256i word_mask(std::size_t bytes) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(bytes / 4)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
template <class V>
inline __attribute__((always_inline)) bool masked_load(const char* from, std::size_t bytes, V& value) {
  if constexpr (sizeof(V) == 32) {
    if (bytes % 4 != 0) return false;
    value =
        __builtin_bit_cast(V, _mm256_maskload_epi32(reinterpret_cast<const int*>(from), word_mask(bytes)));
    return true;
  } else {
    return false;
  }
}
template <class V>
inline __attribute__((always_inline)) bool masked_store(char* to, std::size_t bytes, V value) {
  if constexpr (sizeof(V) == 32) {
    if (bytes % 4 != 0) return false;
    _mm256_maskstore_epi32(reinterpret_cast<int*>(to), word_mask(bytes), __builtin_bit_cast(__m256i, value));
    return true;
  } else {
    return false;
  }
}

}  // namespace
}  // namespace fccl::cpu

#define FCCL_VECTOR_BYTES 32
#define FCCL_MASKED_TAILS
#define FCCL_HARDWARE_HALF
#include "cpu/kernels/reduce_kernels.inc.h"

namespace fccl::cpu {
constinit const KernelTable kAvx2Kernels = make_table();
}  // namespace fccl::cpu
