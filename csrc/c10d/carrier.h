// What carries a group's collectives: the shared-memory engine, the inner backend where ranks do not
// share memory, or, for one rank, nothing. The callers above see plain memory and one set of
// numerics.
//
// Every member but the const ones is called in executor order, by one thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/process.h"
#include "c10d/store_adapter.h"
#include "cpu/group.h"

namespace fccl::c10d_backend {

using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;

// Makes an inner backend over the store it is given.
using InnerFactory = std::function<BackendPtr(const c10::intrusive_ptr<::c10d::Store>&)>;

// What is left of a call's time, as the inner backend wants it: never zero, which it takes for its default.
inline std::chrono::milliseconds inner_timeout(const Deadline& deadline) {
  return std::max(deadline.left(std::chrono::hours(24)), std::chrono::milliseconds(1));
}

class Carrier {
 public:
  enum class Mode { kLocal, kEngine, kInner };

  // Settles, by all ranks together, what carries this group: waits for all of them, for as long as `timeout`.
  // `store` is this incarnation's own; `make_inner` is called if the ranks share no memory, `on_failure` once
  // when the group fails on this rank, and `word` is told to all (GroupConfig).
  Carrier(int rank, int size, std::string group_name, const c10::intrusive_ptr<::c10d::Store>& store,
          const InnerFactory& make_inner, std::chrono::milliseconds timeout,
          std::function<void()> on_failure = {}, std::uint64_t word = 0);

  ~Carrier();
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  Mode mode() const noexcept { return mode_; }
  cpu::Group* group() noexcept { return group_.get(); }
  // Why the engine does not carry this group; empty while it does or nobody knows.
  const std::string& why_inner() const noexcept { return why_inner_; }
  // All ranks' words, by rank.
  const std::vector<std::uint64_t>& words() const noexcept { return words_; }
  // The inner backend, which carries a group whose ranks share no memory; null in other groups.
  const BackendPtr& inner() const noexcept { return inner_; }
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  void all_reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op,
                  const Deadline& deadline);
  void all_gather(const void* input, std::span<void* const> outputs, std::span<const std::size_t> counts,
                  DType dtype, bool uneven, const Deadline& deadline);
  void broadcast(void* buffer, std::size_t count, DType dtype, int root, const Deadline& deadline);
  void barrier(const Deadline& deadline);
  void reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op, int root,
              const Deadline& deadline);
  void reduce_scatter(std::span<const void* const> inputs, std::span<const std::size_t> counts, void* output,
                      DType dtype, ReduceOp op, const Deadline& deadline);
  void all_to_all(const cpu::Group::Pieces& pieces, DType dtype, const Deadline& deadline);
  void gather(const void* input, std::span<void* const> outputs, std::size_t count, DType dtype, int root,
              const Deadline& deadline);
  void scatter(std::span<const void* const> inputs, void* output, std::size_t count, DType dtype, int root,
               const Deadline& deadline);

  // Plain bytes in equal parts, by rank, for a call that gate() has compared already: over the inner backend
  // they are not compared again. (Tensors: the inner backend may go on with them after this rank gave up.)
  void all_to_all_equal(const at::Tensor& input, const at::Tensor& output, const Deadline& deadline);
  void all_gather_equal(const at::Tensor& input, const at::Tensor& output, const Deadline& deadline);

  // Waits for the inner backend's work in slices, so that Ctrl-C, abort() and `deadline` work.
  void wait_for(::c10d::Work& work, const Deadline& deadline);

  // Runs one call. What goes wrong in it outside the engine and outside Gloo (memory for a private copy,
  // say) must not leave this rank with another number than its peers have: if the call had no number
  // yet, it takes one as a rejected call; if it had, the group fails.
  template <typename Body>
  void run(Collective collective, std::chrono::milliseconds timeout, Body&& body) {
    const Deadline deadline = Deadline::after(timeout);
    const std::uint64_t before = sequence_number();
    const std::uint64_t interrupts = interrupts_seen();
    if (mode() == Mode::kInner) throw_if_failed();
    try {
      body(*this, deadline);
    } catch (const Error&) {
      throw;
    } catch (...) {
      fail_locally(collective, before, interrupts_seen() != interrupts, deadline);
      throw;
    }
    count(collective);
  }

  // Compares the ranks' calls; throws on all of them alike if they do not fit.
  void gate(const Description& call, const Deadline& deadline);
  // Tells the peers that this rank refuses its call.
  void reject(const std::string& why, const Deadline& deadline);

  std::map<std::string, std::int64_t> counts() const;

  // In the child of a fork: the parent's connections and threads are not ours to close.
  void forget() noexcept;

 private:
  void count(Collective collective) noexcept { ++counts_[static_cast<std::size_t>(collective)]; }
  void throw_if_failed() const {
    if (const auto failure = group_->failure()) throw Error(*failure);
  }
  // Calls that have taken their place in the group's order, by whichever engine.
  std::uint64_t sequence_number() const noexcept {
    return inner_sequence_ + (group_ ? group_->sequence_number() : 0);
  }
  void fail_locally(Collective collective, std::uint64_t before, bool interrupted, const Deadline& deadline);
  std::string place() const;
  void wait_in_slices(::c10d::Work& work, const Deadline& deadline);

  // ---- over the inner backend (carrier_inner.cpp) ----
  c10::intrusive_ptr<::c10d::Work> send_description(const Description& call, at::Tensor& all,
                                                    const Deadline& deadline);
  void inner_gate(const Description& call, const Deadline& deadline);
  void inner_reject(const std::string& why);
  void inner_all_reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op,
                        const Deadline& deadline);
  void inner_all_gather(const void* input, std::span<void* const> outputs,
                        std::span<const std::size_t> counts, DType dtype, bool uneven,
                        const Deadline& deadline);
  void inner_broadcast(void* buffer, std::size_t count, DType dtype, int root, const Deadline& deadline);
  // ---- and carrier_inner_more.cpp ----
  void inner_reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op, int root,
                    const Deadline& deadline);
  void inner_reduce_scatter(std::span<const void* const> inputs, std::span<const std::size_t> counts,
                            void* output, DType dtype, ReduceOp op, const Deadline& deadline);
  void inner_all_to_all(const cpu::Group::Pieces& pieces, DType dtype, const Deadline& deadline);
  void inner_gather(const void* input, std::span<void* const> outputs, std::size_t count, DType dtype,
                    int root, const Deadline& deadline);
  void inner_scatter(std::span<const void* const> inputs, void* output, std::size_t count, DType dtype,
                     int root, const Deadline& deadline);

  const int rank_;
  const int size_;
  const std::string group_name_;
  std::unique_ptr<cpu::Group> group_;
  BackendPtr inner_;
  // Operations of the inner backend that nobody waits for any more and that may be under way still.
  std::vector<c10::intrusive_ptr<::c10d::Work>> left_behind_;
  Mode mode_ = Mode::kLocal;
  std::uint64_t inner_sequence_ = 0;  // calls compared over the inner backend
  std::string why_inner_;
  std::vector<std::uint64_t> words_;
  std::array<std::atomic<std::int64_t>, kCollectiveCount> counts_{};
};

}  // namespace fccl::c10d_backend
