#include "cpu/block_map.h"

#include <algorithm>
#include <iterator>

namespace fccl::cpu {

void BlockMap::insert(std::uint64_t offset, std::uint64_t size) {
  if (size == 0) return;
  by_offset_.emplace(offset, size);
  by_size_.emplace(size, offset);
  free_bytes_ += size;
}

void BlockMap::erase(Parts::iterator part) {
  free_bytes_ -= part->second;
  by_size_.erase({part->second, part->first});
  by_offset_.erase(part);
}

std::optional<std::uint64_t> BlockMap::take(std::uint64_t size, std::uint64_t alignment) {
  const auto first = by_size_.lower_bound({size, 0});
  if (first == by_size_.end()) return std::nullopt;
  const auto skip = [alignment](std::uint64_t offset) {
    return (alignment - offset % alignment) % alignment;
  };
  auto fit = std::find_if(first, by_size_.end(),
                          [&](const auto& part) { return part.first - size >= skip(part.second); });
  const bool aligned = fit != by_size_.end();
  if (!aligned) fit = first;
  const auto [room, begin] = *fit;
  const std::uint64_t skipped = aligned ? skip(begin) : 0;
  erase(by_offset_.find(begin));
  insert(begin, skipped);
  insert(begin + skipped + size, room - skipped - size);
  return begin + skipped;
}

void BlockMap::give_back(std::uint64_t offset, std::uint64_t size) {
  auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.end() && next->first == offset + size) {
    size += next->second;
    const auto joined = next++;
    erase(joined);
  }
  if (next != by_offset_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      size += previous->second;
      erase(previous);
    }
  }
  insert(offset, size);
}

}  // namespace fccl::cpu
