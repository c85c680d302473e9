// reduce_scatter and reduce, one-shot, staged, and on tensors in the arena.
//
// reduce_scatter: rank r reduces piece r of everybody's input. One-shot (small): every rank writes the
// pieces of the others into its one-shot slot, arrives, and reduces its own out of all slots. Staged: in
// chunk k, part p of a slot holds the k-th part of piece p; a slot is written again when every peer's `done`
// has passed the chunk that was in it. In the arena: straight out of the peers' inputs.
//
// reduce: the root reduces everything; the others stage their whole input, or have it in the arena.
//
// Numerics as in all_reduce.cpp: one kernel call over all ranks' values of an element, in rank order.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "cpu/group_state.h"
#include "cpu/kernels/reduce.h"
#include "cpu/per_rank.h"
#include "cpu/siphash.h"
#include "cpu/zero_copy.h"

namespace fccl::cpu {

namespace {

// One reduction of `size` bytes: rank r's input at sources[r]; what each algorithm ends in.
class Reduction {
 public:
  Reduction(int ranks, std::size_t element, ReduceFunction kernel)
      : ranks_(ranks), element_(element), kernel_(kernel), sources_(ranks) {}
  const void*& operator[](int rank) { return sources_[rank]; }
  void into(void* output, std::size_t size) {
    if (size != 0) kernel_(output, nullptr, sources_.data(), ranks_, size / element_, ranks_);
  }

 private:
  const int ranks_;
  const std::size_t element_;
  const ReduceFunction kernel_;
  PerRank<const void*> sources_;
};

// Runs `stage(k)` into our slots and `take(k)` out of the peers', pipelined.
template <typename Stage, typename Take>
void pipeline(Call& call, std::uint64_t chunks, Stage&& stage, Take&& take) {
  const auto stage_one = [&](std::uint64_t k) {
    const std::uint64_t depth = call.geometry().depth;
    for (int peer = 0; peer < call.world_size() && k >= depth; ++peer) call.await_done(peer, k + 1 - depth);
    stage(k);
    call.publish_staged(k + 1);
  };
  stage_one(0);
  for (std::uint64_t k = 0; k < chunks; ++k) {
    if (k + 1 < chunks) stage_one(k + 1);
    take(k);
    call.publish_done(k + 1);
  }
  call.finish(chunks);
}

// The k-th part of `size` bytes in parts of `part` bytes.
std::size_t length_of(std::uint64_t k, std::size_t part, std::size_t size) {
  return k * part >= size ? 0 : std::min(part, size - k * part);
}

class ReduceScatter {
 public:
  ReduceScatter(Call& call, std::span<const void* const> inputs, std::span<const std::size_t> counts,
                std::byte* output, std::size_t element, ReduceFunction kernel)
      : call_(call),
        inputs_(inputs),
        counts_(counts),
        output_(output),
        element_(element),
        reduction_(call.world_size(), element, kernel) {}

  void one_shot() {
    const std::size_t offset = call_.one_shot_offset();
    std::byte* slot = call_.own_slot(offset);
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer == self() || bytes(peer) == 0) continue;
      std::memcpy(slot, input(peer), bytes(peer));
      slot += bytes(peer);
    }
    call_.arrive();
    call_.meet();
    std::size_t before = 0;
    for (int rank = 0; rank < self(); ++rank) before += bytes(rank);
    for (int peer = 0; peer < ranks(); ++peer) {
      // A peer's slot has no piece for itself.
      reduction_[peer] = call_.slot(peer, offset) + (peer < self() ? before - bytes(peer) : before);
    }
    finish_own(0, bytes(self()));
  }

  // False if a rank's input is not in its arena.
  bool zero_copy(std::size_t total) {
    std::size_t before = 0;
    for (int rank = 0; rank < self(); ++rank) before += bytes(rank);
    for (int peer = 0; peer < ranks(); ++peer) {
      const std::byte* whole = call_.in_arena(peer, End::kInput, total);
      if (whole == nullptr) return false;
      reduction_[peer] = whole + before;
    }
    call_.pause();
    finish_own(0, bytes(self()));
    call_.finish_zero_copy(0);
    return true;
  }

  void staged() {
    const std::size_t part = call_.geometry().piece_bytes;
    const std::size_t largest = *std::max_element(counts_.begin(), counts_.end()) * element_;
    pipeline(
        call_, (largest + part - 1) / part,
        [&](std::uint64_t k) {
          std::byte* slot = call_.own_slot(call_.geometry().staging_offset(k));
          for (int peer = 0; peer < ranks(); ++peer) {
            const std::size_t size = length_of(k, part, bytes(peer));
            if (peer == self() || size == 0) continue;
            std::memcpy(slot + static_cast<std::size_t>(peer) * part, input(peer) + k * part, size);
          }
        },
        [&](std::uint64_t k) {
          for (int peer = 0; peer < ranks(); ++peer) {
            call_.await_staged(peer, k + 1);
            reduction_[peer] = call_.slot(peer, call_.geometry().staging_offset(k)) +
                               static_cast<std::size_t>(self()) * part;
          }
          finish_own(k * part, length_of(k, part, bytes(self())));
        });
  }

 private:
  int ranks() const { return call_.world_size(); }
  int self() const { return call_.rank(); }
  std::size_t bytes(int rank) const { return counts_[static_cast<std::size_t>(rank)] * element_; }
  const std::byte* input(int rank) const {
    return static_cast<const std::byte*>(inputs_[static_cast<std::size_t>(rank)]);
  }
  void finish_own(std::size_t at, std::size_t size) {
    reduction_[self()] = input(self()) + at;
    reduction_.into(output_ + at, size);
  }

  Call& call_;
  const std::span<const void* const> inputs_;
  const std::span<const std::size_t> counts_;
  std::byte* const output_;
  const std::size_t element_;
  Reduction reduction_;
};

void reduce_to_root(Call& call, const std::byte* input, std::byte* output, std::size_t bytes,
                    std::size_t element, ReduceFunction kernel, int root) {
  Reduction reduction(call.world_size(), element, kernel);
  const bool receives = call.rank() == root;
  const auto others = [&](auto&& visit) {
    for (int peer = 0; peer < call.world_size(); ++peer) {
      if (peer != root) visit(peer);
    }
  };
  if (bytes <= call.geometry().one_shot_bytes) {
    const std::size_t offset = call.one_shot_offset();
    if (!receives && bytes != 0) std::memcpy(call.own_slot(offset), input, bytes);
    call.arrive();
    call.meet();
    if (!receives) return;
    others([&](int peer) { reduction[peer] = call.slot(peer, offset); });
    reduction[root] = input;
    reduction.into(output, bytes);
    return;
  }
  call.arrive();
  call.meet();
  bool in_arena = true;
  others([&](int peer) {
    reduction[peer] = call.in_arena(peer, End::kInput, bytes);
    in_arena = in_arena && reduction[peer] != nullptr;
  });
  if (in_arena) {
    if (receives) {
      reduction[root] = input;
      call.pause();
      reduction.into(output, bytes);
    }
    call.finish_zero_copy(0);
    return;
  }
  const std::size_t part = std::min<std::size_t>(256 << 10, call.geometry().chunk_bytes);
  pipeline(
      call, (bytes + part - 1) / part,
      [&](std::uint64_t k) {
        if (receives) return;
        std::memcpy(call.own_slot(call.geometry().staging_offset(k)), input + k * part,
                    length_of(k, part, bytes));
      },
      [&](std::uint64_t k) {
        if (!receives) return;
        others([&](int peer) {
          call.await_staged(peer, k + 1);
          reduction[peer] = call.slot(peer, call.geometry().staging_offset(k));
        });
        reduction[root] = input + k * part;
        reduction.into(output + k * part, length_of(k, part, bytes));
      });
}

}  // namespace

Description describe_reduce_scatter(std::span<const std::size_t> counts, DType dtype, ReduceOp op) {
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  Description description = Description::of(Collective::kReduceScatter, dtype, total, -1, op);
  if (std::equal(counts.begin() + 1, counts.end(), counts.begin())) {
    description.output_count = counts[0];
  } else {
    description.flags = Description::kSizes;
    description.output_count = fingerprint(counts);
  }
  return description;
}

void Group::reduce_scatter(std::span<const void* const> inputs, std::span<const std::size_t> counts,
                           void* output, DType dtype, ReduceOp op, const Deadline& deadline) {
  const ReduceFunction kernel = find_kernel("reduce_scatter", dtype, op, deadline);
  if (inputs.size() != static_cast<std::size_t>(world_size()) || counts.size() != inputs.size()) {
    const std::string why = "reduce_scatter: " + std::to_string(inputs.size()) +
                            " inputs were given, expected " + std::to_string(world_size()) +
                            ", one for each rank";
    reject(why, deadline);
    throw Error(ErrorKind::kInvalid, "fccl " + why + " (" + state_->where() + ")");
  }
  Description description = describe_reduce_scatter(counts, dtype, op);
  const std::size_t element = size_of(dtype);
  const std::size_t total = description.count * element;
  const bool small = total <= state_->geometry.one_shot_bytes;
  bool in_a_row = !small;
  for (std::size_t r = 1; in_a_row && r < inputs.size(); ++r) {
    in_a_row = static_cast<const std::byte*>(inputs[r - 1]) + counts[r - 1] * element == inputs[r];
  }
  if (in_a_row) description.input_at = locate(*state_, inputs[0], total);
  run_call(*state_, description, deadline, [&](Call& call) {
    auto* out = static_cast<std::byte*>(output);
    if (call.world_size() == 1) {
      if (counts[0] != 0) kernel(output, nullptr, inputs.data(), 1, counts[0], 1);
      return;
    }
    ReduceScatter reduce_scatter(call, inputs, counts, out, element, kernel);
    if (small) {
      reduce_scatter.one_shot();
      return;
    }
    call.arrive();
    call.meet();
    if (!reduce_scatter.zero_copy(total)) reduce_scatter.staged();
  });
}

void Group::reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op, int root,
                   const Deadline& deadline) {
  const ReduceFunction kernel = find_kernel("reduce", dtype, op, deadline);
  check_root("reduce", root, deadline);
  Description description = Description::of(Collective::kReduce, dtype, count, root, op);
  const std::size_t element = size_of(dtype);
  const std::size_t bytes = count * element;
  if (rank() != root && bytes > state_->geometry.one_shot_bytes)
    description.input_at = locate(*state_, input, bytes);
  run_call(*state_, description, deadline, [&](Call& call) {
    if (call.world_size() == 1) {
      if (count != 0) kernel(output, nullptr, &input, 1, count, 1);
      return;
    }
    reduce_to_root(call, static_cast<const std::byte*>(input), static_cast<std::byte*>(output), bytes,
                   element, kernel, root);
  });
}

}  // namespace fccl::cpu
