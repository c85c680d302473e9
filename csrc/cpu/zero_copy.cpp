#include "cpu/zero_copy.h"

#include <algorithm>
#include <cstring>

namespace fccl::cpu {

namespace {

// With more than two ranks a slice goes block by block: the result is still in the nearest cache when it is
// copied to the third rank and those after it.
constexpr std::size_t kBlock = 16 << 10;
constexpr std::size_t kChunk = 256 << 10;

bool all_inputs(Call& call, PerRank<const void*>& inputs, const auto& bytes_of) {
  for (int rank = 0; rank < call.world_size(); ++rank) {
    inputs[rank] = call.in_arena(rank, End::kInput, bytes_of(rank));
    if (inputs[rank] == nullptr) return false;
  }
  return true;
}

}  // namespace

std::uint64_t locate(const Group::State& state, const void* data, std::size_t bytes) {
  if (!state.arenas_usable()) return Description::kNowhere;
  return bytes == 0 ? 0 : state.node->own_arena()->locate(data, bytes);
}

bool zero_copy_all_reduce(Call& call, std::size_t count, std::size_t element, ReduceFunction reduce) {
  const int ranks = call.world_size();
  const int self = call.rank();
  const std::size_t bytes = count * element;
  PerRank<const void*> inputs(ranks);
  PerRank<std::byte*> outputs(ranks);
  if (!all_inputs(call, inputs, [&](int) { return bytes; })) return false;
  for (int rank = 0; rank < ranks; ++rank) {
    outputs[rank] = call.in_arena(rank, End::kOutput, bytes);
    if (outputs[rank] == nullptr) return false;
  }
  // Equal slices, in whole lines so that no two ranks write to one.
  const std::size_t share = (bytes / static_cast<std::size_t>(ranks) + kLine) / kLine * kLine;
  const std::size_t begin = std::min(bytes, share * static_cast<std::size_t>(self));
  const std::size_t end = std::min(bytes, begin + share);
  const int second = (self + 1) % ranks;
  const std::size_t step = ranks == 2 ? end - begin : kBlock;
  PerRank<const void*> sources(ranks);
  for (std::size_t at = begin; at < end; at += step) {
    const std::size_t size = std::min(step, end - at);
    for (int rank = 0; rank < ranks; ++rank) sources[rank] = static_cast<const std::byte*>(inputs[rank]) + at;
    call.pause();
    reduce(outputs[self] + at, outputs[second] + at, sources.data(), ranks, size / element, ranks);
    for (int i = 2; i < ranks; ++i) std::memcpy(outputs[(self + i) % ranks] + at, outputs[self] + at, size);
  }
  call.finish_zero_copy(0);
  return true;
}

bool zero_copy_all_gather(Call& call, std::span<void* const> outputs, std::span<const std::size_t> counts,
                          std::size_t element) {
  const auto bytes_of = [&](int rank) { return counts[static_cast<std::size_t>(rank)] * element; };
  PerRank<const void*> inputs(call.world_size());
  if (!all_inputs(call, inputs, bytes_of)) return false;
  // Chunk by chunk, so that all ranks are at about the same place of every input and find it in a cache that
  // they share; each begins with its own, so that not all read one rank's memory at once.
  std::size_t largest = 0;
  for (int rank = 0; rank < call.world_size(); ++rank) largest = std::max(largest, bytes_of(rank));
  for (std::size_t at = 0; at < largest; at += kChunk) {
    for (int i = 0; i < call.world_size(); ++i) {
      const int rank = (call.rank() + i) % call.world_size();
      auto* output = static_cast<std::byte*>(outputs[static_cast<std::size_t>(rank)]);
      if (at >= bytes_of(rank) || output == inputs[rank]) continue;
      call.pause();
      std::memcpy(output + at, static_cast<const std::byte*>(inputs[rank]) + at,
                  std::min(kChunk, bytes_of(rank) - at));
    }
  }
  call.finish_zero_copy(0);
  return true;
}

bool zero_copy_broadcast(Call& call, std::byte* buffer, std::size_t bytes, int root) {
  const std::byte* from = call.in_arena(root, End::kInput, bytes);
  if (from == nullptr) return false;
  if (call.rank() != root) {
    call.pause();
    std::memcpy(buffer, from, bytes);
  }
  call.finish_zero_copy(0);
  return true;
}

}  // namespace fccl::cpu
