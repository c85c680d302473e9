// How the ranks of a group talk while they set up and close what their GPUs share.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "common/descriptor.h"

namespace fccl::cuda {

// Every member is called by all ranks, in the same order. They throw what ends a group.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // All ranks' bytes, by rank; all give as many.
  virtual std::vector<std::byte> all_gather(std::span<const std::byte> own) = 0;
  // Gives every rank a copy of `own`; returns theirs, by rank. In a rank's own place there is none.
  virtual std::vector<Descriptor> exchange(const Descriptor& own) = 0;
  virtual void barrier() = 0;
};

// All ranks' values, by rank. They come from other processes: whoever reads them must take any bytes.
template <class T>
std::vector<T> gather(Peers& peers, const T& own) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto* bytes = reinterpret_cast<const std::byte*>(&own);
  const std::vector<std::byte> all = peers.all_gather({bytes, sizeof(T)});
  std::vector<T> values(static_cast<std::size_t>(peers.size()));
  std::memcpy(values.data(), all.data(), values.size() * sizeof(T));
  return values;
}

}  // namespace fccl::cuda
