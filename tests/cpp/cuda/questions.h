// Every question that the tests put to the launch policy.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/policy.h"
#include "cuda/workspace.h"

namespace fccl::cuda::questions {

inline constexpr std::uint64_t KiB = 1024;
inline constexpr std::uint64_t MiB = 1024 * KiB;
inline constexpr Collective kOurs[] = {Collective::kAllReduce, Collective::kAllGather,
                                       Collective::kBroadcast};
inline constexpr int kArchitectures[] = {70, 80, 86, 89, 90, 100, 103, 120};
inline constexpr Link kLinks[] = {Link::kNone, Link::kPcie, Link::kNvlink};

// Powers of two up to 64 MiB and what lies beside them, ascending; 0 first.
inline const std::vector<std::uint64_t>& sizes() {
  static const std::vector<std::uint64_t> all = [] {
    std::vector<std::uint64_t> sizes = {0};
    for (std::uint64_t power = 1; power <= 64 * MiB; power *= 2) {
      for (const int beside : {-16, -1, 0, 1, 16}) {
        const auto size = static_cast<std::int64_t>(power) + beside;
        if (size > 0) sizes.push_back(static_cast<std::uint64_t>(size));
      }
    }
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    return sizes;
  }();
  return all;
}

inline std::string text(const LaunchQuestion& q) {
  return std::string(name_of(q.collective)) + " " + name_of(q.op) + " of " + std::to_string(q.bytes) +
         " bytes of " + name_of(q.dtype) + ", " + std::to_string(q.world) + " ranks, " + name_of(q.link) +
         ", sm_" + std::to_string(q.architecture) + ", " + std::to_string(q.sm_count) + " SMs, half of " +
         std::to_string(q.half_bytes) + (q.deterministic ? ", deterministic" : "") +
         (q.float32_accumulation ? ", float32" : "");
}

// Calls visit(question) for every question but its size, until the test has failed.
template <class Visit>
void for_each_question(Visit&& visit) {
  struct Device {
    int sm_count;
    std::uint64_t half_bytes;
  };
  LaunchQuestion q;
  for (const Collective collective : kOurs) {
    for (std::uint8_t dtype = 0; dtype < kDTypeCount; ++dtype) {
      for (std::uint8_t op = 0; op < kReduceOpCount; ++op) {
        if (collective != Collective::kAllReduce && op != 0) continue;
        for (int world = 1; world <= kMaxRanks + 1; ++world) {
          for (const Link link : kLinks) {
            for (const int architecture : kArchitectures) {
              for (const Device device : {Device{1, 64 * KiB}, Device{14, 4 * MiB}, Device{132, 256 * MiB}}) {
                for (const unsigned flags : {0u, 1u, 2u, 3u}) {
                  q.collective = collective;
                  q.dtype = static_cast<DType>(dtype);
                  q.op = static_cast<ReduceOp>(op);
                  q.world = world;
                  q.link = link;
                  q.architecture = architecture;
                  q.sm_count = device.sm_count;
                  q.half_bytes = device.half_bytes;
                  q.deterministic = (flags & 1) != 0;
                  q.float32_accumulation = (flags & 2) != 0;
                  if (!testing::Test::HasFailure()) visit(q);
                }
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace fccl::cuda::questions
