// all_reduce, one-shot and staged; without copies: zero_copy.h.
//
// One-shot (small): every rank writes its message into its own one-shot slot, arrives, and reduces all
// slots itself. One rendezvous; world_size times the reading. The slot alternates by the call's parity
// (I4), since data is written before the peers are known to have left the previous call.
//
// Staged (large): a reduce-scatter and an all-gather, chunk by chunk, through slots that stay in cache.
// A chunk is cut into one piece per rank; rank r reduces piece r. Per chunk k a rank does
//
//   stage(k)    copies the pieces of its input that others reduce into staging slot k; staged = k+1
//   reduce(k)   waits for every peer's staged > k; reduces its own piece, in rank order, from its input
//               and the peers' slots, into its output and its result slot k; done = k+1
//   collect(k)  waits for each peer's done > k; copies the peer's piece into its output
//
// in the order   stage(0) | stage(1) reduce(0) | stage(2) reduce(1) collect(0) | stage(3) reduce(2)
// collect(1) | … so that each wait is for something a peer did an iteration ago, and rarely waits at all.
//
// Why `depth` = 3 slots are enough, with no further wait:
//   - stage(k+1) overwrites what peers read in reduce(k-2). In the iteration before, collect(k-2)
//     waited for every peer's done > k-2, which is stored after that reading.
//   - reduce(k) overwrites the result slot that peers read in collect(k-3). reduce(k) first waits for
//     every peer's staged > k; a peer stages k at the start of its iteration k-1, after its iteration
//     k-2 ended, whose collect was collect(k-3).
//   - At the start of a call all slots are free: the rendezvous of this call (I3).
//
// In place: stage(k) reads chunk k of the input before reduce(k) and collect(k) write chunk k of the
// output, and the own piece is read by the very kernel that writes it, element by element.
//
// Numerics: every element is reduced by one kernel call over all ranks' values in rank order, whichever
// path it takes and wherever chunks begin, so the result does not depend on any of that.
#include <algorithm>
#include <cstring>

#include "cpu/group_state.h"
#include "cpu/kernels/reduce.h"
#include "cpu/per_rank.h"
#include "cpu/zero_copy.h"

namespace fccl::cpu {

namespace {

void one_shot(Call& call, const void* input, void* output, std::size_t count, std::size_t element,
              ReduceFunction reduce) {
  const std::size_t offset = call.one_shot_offset();
  if (count != 0) std::memcpy(call.own_slot(offset), input, count * element);
  call.arrive();
  call.meet();
  if (count == 0) return;
  const int ranks = call.world_size();
  PerRank<const void*> sources(ranks);
  for (int rank = 0; rank < ranks; ++rank) sources[rank] = call.slot(rank, offset);
  reduce(output, nullptr, sources.data(), ranks, count, ranks);
}

class Staged {
 public:
  Staged(Call& call, const void* input, void* output, std::size_t count, std::size_t element,
         ReduceFunction kernel)
      : call_(call),
        input_(static_cast<const std::byte*>(input)),
        output_(static_cast<std::byte*>(output)),
        bytes_(count * element),
        element_(element),
        kernel_(kernel),
        sources_(call.world_size()) {}

  void run() {
    const std::uint64_t chunks = (bytes_ + chunk_bytes() - 1) / chunk_bytes();
    stage(0);
    for (std::uint64_t k = 0; k < chunks; ++k) {
      if (k + 1 < chunks) stage(k + 1);
      reduce(k);
      if (k > 0) collect(k - 1);
    }
    collect(chunks - 1);
    call_.finish(chunks);
  }

 private:
  struct Piece {
    std::size_t begin;  // bytes from the start of the chunk
    std::size_t size;
  };

  // Whole elements: slots are multiples of 128 bytes and elements at most 8.
  std::size_t chunk_bytes() const { return call_.geometry().chunk_bytes; }
  std::size_t chunk_begin(std::uint64_t k) const { return k * chunk_bytes(); }

  // What `rank` reduces of chunk k: equal shares, rounded up to a line so that ranks do not write to
  // one line; the last ones of a short chunk may be smaller or empty.
  Piece piece(std::uint64_t k, int rank) const {
    const std::size_t size = std::min(chunk_bytes(), bytes_ - chunk_begin(k));
    const auto ranks = static_cast<std::size_t>(call_.world_size());
    const std::size_t share = ((size + ranks - 1) / ranks + kLine - 1) / kLine * kLine;
    const std::size_t begin = std::min(size, share * static_cast<std::size_t>(rank));
    return {begin, std::min(size - begin, share)};
  }

  void stage(std::uint64_t k) {
    std::byte* slot = call_.own_slot(call_.geometry().staging_offset(k));
    for (int peer = 0; peer < call_.world_size(); ++peer) {
      if (peer == call_.rank()) continue;
      const Piece p = piece(k, peer);
      std::memcpy(slot + p.begin, input_ + chunk_begin(k) + p.begin, p.size);
    }
    call_.publish_staged(k + 1);
  }

  void reduce(std::uint64_t k) {
    const Piece p = piece(k, call_.rank());
    const std::size_t at = chunk_begin(k) + p.begin;
    for (int peer = 0; peer < call_.world_size(); ++peer) {
      call_.await_staged(peer, k + 1);
      sources_[peer] = call_.slot(peer, call_.geometry().staging_offset(k)) + p.begin;
    }
    sources_[call_.rank()] = input_ + at;
    if (p.size != 0) {
      kernel_(output_ + at, call_.own_slot(call_.geometry().result_offset(k)), sources_.data(),
              call_.world_size(), p.size / element_, call_.world_size());
    }
    call_.publish_done(k + 1);
  }

  void collect(std::uint64_t k) {
    // Each rank starts with its successor, so that not all read one rank's results at once.
    for (int i = 1; i < call_.world_size(); ++i) {
      const int peer = (call_.rank() + i) % call_.world_size();
      const Piece p = piece(k, peer);
      call_.await_done(peer, k + 1);
      std::memcpy(output_ + chunk_begin(k) + p.begin, call_.slot(peer, call_.geometry().result_offset(k)),
                  p.size);
    }
  }

  Call& call_;
  const std::byte* const input_;
  std::byte* const output_;
  const std::size_t bytes_;
  const std::size_t element_;
  const ReduceFunction kernel_;
  PerRank<const void*> sources_;
};

}  // namespace

Group::ReduceKernel Group::find_kernel(const char* name, DType dtype, ReduceOp op, const Deadline& deadline) {
  const ReduceFunction kernel = find_reduce(dtype, op);
  if (kernel != nullptr) return kernel;
  const std::string why = std::string(name) + ": " + name_of(op) + " is not defined for " + name_of(dtype);
  reject(why, deadline);
  throw Error(ErrorKind::kInvalid, "fccl " + why + " (" + state_->where() + ")");
}

void Group::all_reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op,
                       const Deadline& deadline) {
  const ReduceFunction kernel = find_kernel("all_reduce", dtype, op, deadline);
  Description description = Description::of(Collective::kAllReduce, dtype, count, -1, op);
  const std::size_t element = size_of(dtype);
  const std::size_t bytes = count * element;
  const bool small = bytes <= state_->geometry.one_shot_bytes;
  if (!small) {
    description.input_at = locate(*state_, input, bytes);
    description.output_at = locate(*state_, output, bytes);
  }
  run_call(*state_, description, deadline, [&](Call& call) {
    if (call.world_size() == 1) {
      const void* const sources[] = {input};
      if (count != 0) kernel(output, nullptr, sources, 1, count, 1);
    } else if (small) {
      one_shot(call, input, output, count, element, kernel);
    } else {
      call.arrive();
      call.meet();
      if (!zero_copy_all_reduce(call, count, element, kernel))
        Staged(call, input, output, count, element, kernel).run();
    }
  });
}

}  // namespace fccl::cpu
