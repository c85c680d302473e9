// Collectives on tensors that lie in the ranks' arenas: no slots and no copies into them.
//
// Which ends must be in their ranks' arenas:
//
//   | collective | input     | output    | what moves                                     |
//   | ---------- | --------- | --------- | ---------------------------------------------- |
//   | all_reduce | all ranks | all ranks | each rank reduces its slice of all inputs into |
//   |            |           |           | that slice of all outputs                      |
//   | all_gather | all ranks | -         | each rank copies every peer's input            |
//   | broadcast  | the root  | -         | each rank copies the root's                    |
//
// The others are where their staged paths are: reduce_scatter and reduce (inputs of all ranks, but for the
// root's) in reduce_scatter.cpp; all_to_all, gather and scatter (piece by piece, each where its sender has
// it) in exchange.cpp.
//
// Where it is not so on every rank that counts, all ranks take the staged path. The descriptions of the call
// say where tensors are, so all ranks decide alike from the same words.
//
// A collective here succeeds only when every peer has said that it is done with this rank's memory (done
// has grown by one): the caller may write to it or free it at once.
#pragma once

#include <cstddef>
#include <span>

#include "cpu/group_state.h"
#include "cpu/kernels/reduce.h"
#include "cpu/per_rank.h"

namespace fccl::cpu {

// Where `bytes` bytes at `data` lie in this rank's arena, or kNowhere if they do not or the peers' arenas are
// not mapped here. Nothing, zero bytes, lies anywhere.
std::uint64_t locate(const Group::State& state, const void* data, std::size_t bytes);

// After meet(). Each returns false, having done nothing, if the call cannot do without copies; `count` and
// `element` as in the staged paths.
bool zero_copy_all_reduce(Call& call, std::size_t count, std::size_t element, ReduceFunction reduce);
bool zero_copy_all_gather(Call& call, std::span<void* const> outputs, std::span<const std::size_t> counts,
                          std::size_t element);
bool zero_copy_broadcast(Call& call, std::byte* buffer, std::size_t bytes, int root);

}  // namespace fccl::cpu
