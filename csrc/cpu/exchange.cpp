// all_to_all, gather and scatter: every rank has a piece for every rank, of which many may be empty.
//
// No rank knows what another sends or expects, so each publishes a row with its arrival, at the front of its
// one-shot slot: for every peer what it sends to it, what it expects of it, and where the piece lies if that
// is in the arena. Behind the row follow the pieces themselves, where there is room. After the rendezvous all
// ranks have all rows before them and conclude alike:
//
//   - a pair that does not agree on a size is a mismatch, on every rank (I6);
//   - pieces in the sender's arena are copied from there by the receiver (I8);
//   - the others are copied out of the one-shot slots if every rank's have room there, else they go in parts
//     through the staging slots: in chunk k, part p of a slot holds the k-th part of the piece for rank p.
//
// A slot is written again when every peer's `done` has passed the chunk that was in it, as in all_gather.
// Pieces in arenas are copied before the first `done` of the call is published, so that I8 holds.
#include <algorithm>
#include <cstring>

#include "cpu/group_state.h"
#include "cpu/tuning.h"
#include "cpu/zero_copy.h"

namespace fccl::cpu {

namespace {

// What a rank says about one of its peers.
struct Entry {
  std::uint64_t sends = 0;  // bytes
  std::uint64_t expects = 0;
  std::uint64_t at = Description::kNowhere;  // of what it sends, in its arena
};

class Exchange {
 public:
  Exchange(Call& call, const Group::State& state, const Group::Pieces& pieces, std::size_t element)
      : call_(call),
        state_(state),
        pieces_(pieces),
        element_(element),
        ranks_(static_cast<std::size_t>(call.world_size())),
        self_(static_cast<std::size_t>(call.rank())),
        offset_(call.one_shot_offset()),
        table_(ranks_ * ranks_) {}

  void run() {
    write_row();
    write_small_pieces();
    call_.arrive();
    call_.meet();
    read_rows();
    check();
    copy_own();
    pull();
    const std::uint64_t chunks = fits_one_shot() ? 0 : count_chunks();
    if (chunks == 0) {
      copy_small_pieces();
    } else {
      staged(chunks);
    }
    if (any_placed()) {
      call_.finish_zero_copy(chunks);
    } else {
      call_.finish(chunks);
    }
  }

 private:
  Entry& entry(std::size_t from, std::size_t about) { return table_[from * ranks_ + about]; }
  // Whether the piece goes through slots.
  bool is_slotted(std::size_t from, std::size_t to) {
    return from != to && entry(from, to).at == Description::kNowhere;
  }
  std::size_t row_bytes() const { return (ranks_ * sizeof(Entry) + kLine - 1) / kLine * kLine; }
  std::size_t part_bytes() const { return call_.geometry().piece_bytes; }
  const std::byte* input(std::size_t to) const { return static_cast<const std::byte*>(pieces_.inputs[to]); }
  std::byte* output(std::size_t from) const { return static_cast<std::byte*>(pieces_.outputs[from]); }

  void write_row() {
    std::vector<std::uint64_t> exposed;
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
      Entry& mine = entry(self_, peer);
      mine.sends = pieces_.input_counts[peer] * element_;
      mine.expects = pieces_.output_counts[peer] * element_;
      if (peer == self_ || mine.sends <= kZeroCopyBytes) continue;
      mine.at = locate(state_, input(peer), mine.sends);
      if (mine.at != Description::kNowhere) exposed.push_back(mine.at);
    }
    if (!exposed.empty()) call_.expose(std::move(exposed));
    std::memcpy(call_.own_slot(offset_), &entry(self_, 0), ranks_ * sizeof(Entry));
    if (state_.config.testing.lie) [[unlikely]]
      state_.config.testing.lie(call_.own_slot(offset_), true);
  }

  // Where in a rank's slot its piece for `to` lies; for to == ranks_ the end of all.
  std::size_t place_in_slot(std::size_t from, std::size_t to) {
    std::size_t at = row_bytes();
    for (std::size_t peer = 0; peer < to; ++peer) {
      // Saturates: a size that a peer made up must not wrap around.
      if (is_slotted(from, peer))
        at += std::min<std::size_t>(entry(from, peer).sends, call_.geometry().one_shot_bytes + 1);
    }
    return at;
  }

  void write_small_pieces() {
    if (place_in_slot(self_, ranks_) > call_.geometry().one_shot_bytes) return;
    std::byte* to = call_.own_slot(offset_ + row_bytes());
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
      if (!is_slotted(self_, peer) || entry(self_, peer).sends == 0) continue;
      std::memcpy(to, input(peer), entry(self_, peer).sends);
      to += entry(self_, peer).sends;
    }
  }

  void read_rows() {
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
      if (peer == self_) continue;
      std::memcpy(&entry(peer, 0), call_.slot(static_cast<int>(peer), offset_), ranks_ * sizeof(Entry));
    }
    if (state_.arenas_usable()) return;
    for (Entry& each : table_) each.at = Description::kNowhere;  // as every peer has said, if it is sane
  }

  void check() {
    for (std::size_t from = 0; from < ranks_; ++from) {
      for (std::size_t to = 0; to < ranks_; ++to) {
        const std::uint64_t sends = entry(from, to).sends;
        const std::uint64_t expects = entry(to, from).expects;
        if (sends == expects) continue;
        call_.mismatch("rank " + std::to_string(from) + " sends " + std::to_string(sends / element_) +
                       " elements to rank " + std::to_string(to) + ", which expects " +
                       std::to_string(expects / element_) +
                       ". No data was exchanged and the group stays usable.");
      }
    }
  }

  bool any_placed() const {
    return std::any_of(table_.begin(), table_.end(),
                       [](const Entry& each) { return each.at != Description::kNowhere; });
  }

  bool fits_one_shot() {
    for (std::size_t from = 0; from < ranks_; ++from) {
      if (place_in_slot(from, ranks_) > call_.geometry().one_shot_bytes) return false;
    }
    return true;
  }

  std::uint64_t count_chunks() {
    std::uint64_t largest = 0;
    for (std::size_t from = 0; from < ranks_; ++from) {
      for (std::size_t to = 0; to < ranks_; ++to) {
        if (is_slotted(from, to)) largest = std::max(largest, entry(from, to).sends);
      }
    }
    return (largest + part_bytes() - 1) / part_bytes();
  }

  void copy_own() {
    const std::size_t size = entry(self_, self_).sends;
    if (size != 0 && output(self_) != input(self_)) std::memcpy(output(self_), input(self_), size);
  }

  // Each rank starts with its successor, so that not all read one rank's memory at once.
  template <typename Visit>
  void each_peer(Visit&& visit) {
    for (std::size_t i = 1; i < ranks_; ++i) visit((self_ + i) % ranks_);
  }

  void pull() {
    each_peer([&](std::size_t peer) {
      const Entry& theirs = entry(peer, self_);
      if (theirs.at == Description::kNowhere) return;
      const std::byte* from = call_.in_arena(static_cast<int>(peer), theirs.at, theirs.sends);
      call_.pause();
      std::memcpy(output(peer), from, theirs.sends);
    });
  }

  void copy_small_pieces() {
    each_peer([&](std::size_t peer) {
      const std::size_t size = entry(peer, self_).sends;
      if (!is_slotted(peer, self_) || size == 0) return;
      const std::byte* slot = call_.slot(static_cast<int>(peer), offset_);
      std::memcpy(output(peer), slot + place_in_slot(peer, self_), size);
    });
  }

  // The k-th part of a piece of `size` bytes.
  std::size_t part(std::uint64_t k, std::size_t size) const {
    return k * part_bytes() >= size ? 0 : std::min(part_bytes(), size - k * part_bytes());
  }

  void staged(std::uint64_t chunks) {
    stage(0);
    for (std::uint64_t k = 0; k < chunks; ++k) {
      if (k + 1 < chunks) stage(k + 1);
      each_peer([&](std::size_t peer) { collect(peer, k); });
      call_.publish_done(k + 1);
    }
  }

  void stage(std::uint64_t k) {
    const Geometry& geometry = call_.geometry();
    for (int peer = 0; peer < call_.world_size() && k >= geometry.depth; ++peer) {
      call_.await_done(peer, k + 1 - geometry.depth);
    }
    std::byte* slot = call_.own_slot(geometry.staging_offset(k));
    each_peer([&](std::size_t peer) {
      if (!is_slotted(self_, peer)) return;
      const std::size_t size = part(k, entry(self_, peer).sends);
      if (size != 0) std::memcpy(slot + peer * part_bytes(), input(peer) + k * part_bytes(), size);
    });
    call_.publish_staged(k + 1);
  }

  void collect(std::size_t peer, std::uint64_t k) {
    call_.await_staged(static_cast<int>(peer), k + 1);
    if (!is_slotted(peer, self_)) return;
    const std::size_t size = part(k, entry(peer, self_).sends);
    if (size == 0) return;
    const std::byte* slot = call_.slot(static_cast<int>(peer), call_.geometry().staging_offset(k));
    std::memcpy(output(peer) + k * part_bytes(), slot + self_ * part_bytes(), size);
  }

  Call& call_;
  const Group::State& state_;
  const Group::Pieces& pieces_;
  const std::size_t element_;
  const std::size_t ranks_;
  const std::size_t self_;
  const std::size_t offset_;
  std::vector<Entry> table_;  // by rank, then by the peer that is spoken of
};

std::vector<std::size_t> only(int rank, int ranks, std::size_t count) {
  std::vector<std::size_t> counts(static_cast<std::size_t>(ranks), 0);
  counts[static_cast<std::size_t>(rank)] = count;
  return counts;
}

}  // namespace

void Group::exchange(const Description& description, const Pieces& pieces, const Deadline& deadline) {
  State& state = *state_;
  const auto ranks = static_cast<std::size_t>(world_size());
  std::string why;
  if (pieces.inputs.size() != ranks || pieces.outputs.size() != ranks ||
      pieces.input_counts.size() != ranks || pieces.output_counts.size() != ranks) {
    why = std::string(name_of(description.collective)) + ": expected " + std::to_string(ranks) +
          " inputs, outputs and counts, one of each for each rank";
  } else if (ranks > 1 && ranks * sizeof(Entry) > state.geometry.one_shot_bytes / 2) {
    why = std::string(name_of(description.collective)) + ": too many ranks (" + std::to_string(ranks) + ")";
  }
  if (!why.empty()) {
    reject(why, deadline);
    throw Error(ErrorKind::kInvalid, "fccl " + why + " (" + state.where() + ")");
  }
  run_call(state, description, deadline, [&](Call& call) {
    const std::size_t element = size_of(description.dtype);
    if (call.world_size() == 1) {
      const std::size_t bytes = pieces.input_counts[0] * element;
      if (bytes != 0 && pieces.outputs[0] != pieces.inputs[0])
        std::memcpy(pieces.outputs[0], pieces.inputs[0], bytes);
      return;
    }
    Exchange(call, state, pieces, element).run();
  });
}

void Group::all_to_all(const Pieces& pieces, DType dtype, const Deadline& deadline) {
  Description description = Description::of(Collective::kAllToAll, dtype, 0);
  for (const std::size_t count : pieces.input_counts) description.count += count;
  description.flags = Description::kUneven;
  exchange(description, pieces, deadline);
}

void Group::gather(const void* input, std::span<void* const> outputs, std::size_t count, DType dtype,
                   int root, const Deadline& deadline) {
  const auto ranks = static_cast<std::size_t>(world_size());
  check_root("gather", root, deadline);
  std::vector<const void*> inputs(ranks, nullptr);
  inputs[static_cast<std::size_t>(root)] = input;
  const std::vector<std::size_t> sends = only(root, world_size(), count);
  const bool receives = rank() == root;
  const std::vector<std::size_t> expects(ranks, receives ? count : 0);
  const std::vector<void*> none(ranks, nullptr);
  exchange(Description::of(Collective::kGather, dtype, count, root),
           {inputs, sends, receives ? outputs : std::span<void* const>(none), expects}, deadline);
}

void Group::scatter(std::span<const void* const> inputs, void* output, std::size_t count, DType dtype,
                    int root, const Deadline& deadline) {
  const auto ranks = static_cast<std::size_t>(world_size());
  check_root("scatter", root, deadline);
  std::vector<void*> outputs(ranks, nullptr);
  outputs[static_cast<std::size_t>(root)] = output;
  const std::vector<std::size_t> expects = only(root, world_size(), count);
  const bool sends_all = rank() == root;
  const std::vector<std::size_t> sends(ranks, sends_all ? count : 0);
  const std::vector<const void*> none(ranks, nullptr);
  exchange(Description::of(Collective::kScatter, dtype, count, root),
           {sends_all ? inputs : std::span<const void* const>(none), sends, outputs, expects}, deadline);
}

}  // namespace fccl::cpu
