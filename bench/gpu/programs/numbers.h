// Random gradients: numbers of many magnitudes, and every kind that a cast or a scale could get wrong.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace fccl::gpu_check {

class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : random_(seed) {}

  // One in sixteen is special.
  float next() {
    const auto word = static_cast<std::uint32_t>(random_());
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    switch (random_() % 160) {
      case 0: return kInfinity;
      case 1: return -kInfinity;
      case 2: return __builtin_bit_cast(float, 0x7fc00000u | (word & 0x803fffffu));  // any NaN that is quiet
      case 3: return __builtin_bit_cast(float, word & 0x807fffffu);                  // subnormal or zero
      case 4: return -0.0f;
      case 5: return std::numeric_limits<float>::max();
      case 6: return std::ldexp(static_cast<float>(word % 4096), -24);  // around float16's subnormals
      case 7: return 65519.0f + static_cast<float>(word % 3);           // around float16's largest
      case 8: return std::ldexp(1.0f, static_cast<int>(word % 250) - 125);
      case 9: return 0.0f;
      default: return normal_(random_);
    }
  }
  // Of one magnitude, with none of the above.
  float plain() { return normal_(random_); }
  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }

 private:
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
};

}  // namespace fccl::gpu_check
