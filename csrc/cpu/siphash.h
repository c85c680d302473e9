// SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012): a keyed hash of short
// messages whose output cannot be guessed without the key. Used to prove knowledge of a group's token.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

namespace fccl::cpu {

using SipKey = std::array<std::uint64_t, 2>;

inline std::uint64_t siphash(const SipKey& key, const void* data, std::size_t size) noexcept {
  std::uint64_t v0 = key[0] ^ 0x736f6d6570736575ULL;
  std::uint64_t v1 = key[1] ^ 0x646f72616e646f6dULL;
  std::uint64_t v2 = key[0] ^ 0x6c7967656e657261ULL;
  std::uint64_t v3 = key[1] ^ 0x7465646279746573ULL;
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1, v1 = std::rotl(v1, 13), v1 ^= v0, v0 = std::rotl(v0, 32);
      v2 += v3, v3 = std::rotl(v3, 16), v3 ^= v2;
      v0 += v3, v3 = std::rotl(v3, 21), v3 ^= v0;
      v2 += v1, v1 = std::rotl(v1, 17), v1 ^= v2, v2 = std::rotl(v2, 32);
    }
  };
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::size_t left = size;
  for (; left >= 8; left -= 8, bytes += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes, 8);
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
  std::uint64_t last = static_cast<std::uint64_t>(size) << 56;
  for (std::size_t i = 0; i < left; ++i) last |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
  v3 ^= last;
  rounds(2);
  v0 ^= last;
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

// Names a list of sizes in a description of a call; never 0.
template <typename Sizes>
std::uint64_t fingerprint(const Sizes& sizes) {
  const std::vector<std::uint64_t> wide(std::begin(sizes), std::end(sizes));
  return siphash({0, 0}, wide.data(), wide.size() * sizeof(std::uint64_t)) | 1;
}

}  // namespace fccl::cpu
