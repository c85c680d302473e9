// A group of ranks that share memory: its collectives. This is the face of the engine.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/description.h"
#include "common/descriptor.h"
#include "common/dtype.h"
#include "common/error.h"

namespace fccl::cpu {

// What the engine needs of torch's Store. Implementations are thread-safe and do not block for long.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // The value, or nothing if the key is not there yet.
  virtual std::optional<std::string> try_get(const std::string& key) = 0;
};

// Called every 50 to 100 ms by a thread that waits. Throws to stop waiting (Ctrl-C): the group is
// then failed on this rank and its peers are told.
using InterruptCheck = std::function<void()>;
void set_interrupt_check(InterruptCheck check);

// For tests only: makes the protocol wrong on purpose and gives races room, so that the tests of its
// invariants can be shown to have power. Must be equal on all ranks, the functions apart.
struct GroupTesting {
  std::uint32_t depth = 0;       // slots of the pipelines instead of what they need; 0: what they need
  bool single_one_shot = false;  // one one-shot slot instead of two
  bool hasty = false;            // a call without copies returns before the peers are done with its memory
  bool no_bells = false;         // what is put into a lane wakes nobody who sleeps on it
  std::chrono::milliseconds send_grace{0};  // how long a rank that leaves waits for its sends; 0: kSendGrace
  bool no_patience = false;     // a call that failed leaves its memory to the peers that are at it
  std::function<void()> pause;  // called by a rank just before it reads a peer's slot or tensor
  // Called with what this rank says in a call, before the peers may read it: with its description, and with
  // its row of an exchange (`is_row`).
  std::function<void(void* said, bool is_row)> lie;
};

struct GroupConfig {
  int rank = 0;
  int world_size = 1;
  std::string name;                      // for messages: torch's group name
  std::shared_ptr<KeyValueStore> store;  // private to this incarnation of the group
  // What this rank tells its peers when they connect, for those above the engine: see words().
  std::uint64_t word = 0;
  GroupTesting testing = {};
  // Called once, when the group has failed on this rank, whatever the reason: by a thread that noticed, with
  // no lock held, after the peers have been told and before that thread throws. Must not throw.
  std::function<void()> on_failure = {};
};

// Thread-safety: connect() and the collectives are made by one thread at a time, in the same order on every
// rank (the executor in c10d/ sees to that). abort(), failure(), leave() and the const members may
// be called from any thread at any time.
//
// Errors: every member that communicates throws fccl::Error. After a sticky one (Error::is_sticky)
// each later call throws the same error at once.
class PointToPoint;

class Group {
 public:
  explicit Group(GroupConfig config);
  ~Group();  // leaves
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const noexcept;
  int world_size() const noexcept;

  // Finds the peers and maps their memory; all ranks of the group call it together. True: the
  // engine carries this group's collectives. False, on every rank alike: it cannot, and why_not()
  // says why. Throws if a peer does not show up before the deadline. Later calls return at once.
  bool connect(const Deadline& deadline);
  const std::string& why_not() const noexcept;
  // What each rank says in GroupConfig::word, by rank: known once connect() has returned, whether true or
  // false. A stranger's bits.
  const std::vector<std::uint64_t>& words() const noexcept;
  // Whether a wait spins before it sleeps: only where each rank of the node has a core of its own.
  bool spins() const noexcept;

  // ---- collectives (connect() must have returned true) ----

  // Reduces `count` elements over all ranks into `output`; `input` may be `output`, no other overlap.
  void all_reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op,
                  const Deadline& deadline);
  // outputs[r] receives rank r's `counts[r]` elements; counts[rank()] of `input` are sent. `uneven`
  // says that the caller's form of the call allows counts to differ from rank to rank. input may be
  // outputs[rank()] exactly.
  void all_gather(const void* input, std::span<void* const> outputs, std::span<const std::size_t> counts,
                  DType dtype, bool uneven, const Deadline& deadline);
  void broadcast(void* buffer, std::size_t count, DType dtype, int root, const Deadline& deadline);
  void barrier(const Deadline& deadline);
  // Reduces inputs[r], counts[r] elements, over all ranks into rank r's `output`, which may be
  // inputs[rank()]. All ranks give the same counts.
  void reduce_scatter(std::span<const void* const> inputs, std::span<const std::size_t> counts, void* output,
                      DType dtype, ReduceOp op, const Deadline& deadline);
  // Into `output` on the root, where it may be `input`; not used elsewhere.
  void reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op, int root,
              const Deadline& deadline);
  // What a rank sends to every rank and expects of every rank, by rank; counts are of elements.
  struct Pieces {
    std::span<const void* const> inputs;
    std::span<const std::size_t> input_counts;
    std::span<void* const> outputs;
    std::span<const std::size_t> output_counts;
  };
  // inputs and outputs must not overlap, but for inputs[rank()], which may be outputs[rank()].
  void all_to_all(const Pieces& pieces, DType dtype, const Deadline& deadline);
  // `outputs` by rank, on the root; not used elsewhere. So are scatter's `inputs`.
  void gather(const void* input, std::span<void* const> outputs, std::size_t count, DType dtype, int root,
              const Deadline& deadline);
  void scatter(std::span<const void* const> inputs, void* output, std::size_t count, DType dtype, int root,
               const Deadline& deadline);

  // Messages between two ranks, beside the collectives and without a number.
  PointToPoint& point_to_point() const;

  // Compares descriptions and moves no data: a barrier, and the gate in front of what is
  // several collectives.
  void gate(const Description& call, const Deadline& deadline);

  // Gives every rank a copy of `own`, and returns theirs, by rank; in this rank's own place there is none.
  std::vector<Descriptor> exchange_descriptors(const Descriptor& own, const Deadline& deadline);

  // Takes a number for a call that this rank refuses and tells the peers, so that they raise an
  // error too instead of waiting. Does not wait for them, unless a dozen refused calls in a row are
  // ahead of a peer already. Trouble fails the group and shows in the next call.
  void reject(const std::string& why, const Deadline& deadline) noexcept;

  // ---- failure ----

  // Fails the group: pending and later calls raise, here and, as soon as they look, on the peers.
  void abort(const std::string& reason) noexcept;
  // Says goodbye. Peers that still wait for this rank learn that it left. Idempotent. Must not be
  // called while a collective runs in another thread (abort() first).
  // `why` is told to peers that wait for it.
  void leave(const std::string& why) noexcept;
  // For a rank that cannot leave, since a collective is stuck in another thread: fails what is left of its
  // messages and ends their thread.
  void end_messages(const std::string& why) noexcept;
  // The sticky error, if any.
  std::optional<Error> failure() const;

  // The ranks that have not come to this rank's last collective.
  std::vector<int> missing_ranks() const;
  // What a peer says that has failed in the present collective or before it, without waiting for anybody.
  std::optional<std::string> trouble_of_a_peer() const;

  // That a rank will make no more calls, since its process has ended or it has left the group; or nothing.
  // Waits for nobody, and fails nothing.
  std::optional<std::string> lost_rank() const;

  // Number of collectives begun so far (rejected ones and gates included).
  std::uint64_t sequence_number() const noexcept;
  // How many of them found the tensors in the ranks' arenas and went without copies.
  std::uint64_t zero_copy_count() const noexcept;
  // Why tensors are never found there, or empty if they may be. After connect().
  std::string why_no_zero_copy() const;

  struct State;  // implementation: group_state.h

 private:
  // As the kernels have it (kernels/reduce.h).
  using ReduceKernel = void (*)(void*, void*, const void* const*, int, std::size_t, int);

  // Each rejects the call and throws kInvalid if there is no such kernel or rank.
  ReduceKernel find_kernel(const char* name, DType dtype, ReduceOp op, const Deadline& deadline);
  void check_root(const char* name, int root, const Deadline& deadline);
  void exchange(const Description& description, const Pieces& pieces, const Deadline& deadline);

  std::shared_ptr<State> state_;
};

// How the ranks of a reduce_scatter describe their call: rank r receives counts[r] elements.
Description describe_reduce_scatter(std::span<const std::size_t> counts, DType dtype, ReduceOp op);

// How the ranks of an all_gather describe their call: rank r contributes counts[r] elements.
Description describe_all_gather(std::span<const std::size_t> counts, int rank, DType dtype, bool uneven);

// Why memory cannot be shared between processes here, or empty if it can: tries the engine's own
// steps (memfd, sealing, mapping, abstract sockets, passing a descriptor). For `fccl info`.
std::string why_no_shared_memory();

}  // namespace fccl::cpu
