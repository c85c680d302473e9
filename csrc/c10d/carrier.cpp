#include "c10d/carrier.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <set>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/process.h"

namespace fccl::c10d_backend {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(100);

// Bool as the engine has it: any true byte is 1; sums are OR and products AND.
void normalise_bool(const void* input, void* output, std::size_t count) {
  const auto* from = static_cast<const unsigned char*>(input);
  auto* to = static_cast<unsigned char*>(output);
  for (std::size_t i = 0; i < count; ++i) to[i] = from[i] != 0;
}

// What a single rank has for collectives.
void copy_alone(const void* input, void* output, std::size_t count, DType dtype) {
  if (input != output && count != 0) std::memmove(output, input, count * size_of(dtype));
}
void reduce_alone(const void* input, void* output, std::size_t count, DType dtype) {
  dtype == DType::kBool ? normalise_bool(input, output, count) : copy_alone(input, output, count, dtype);
}

std::string list(std::span<const std::size_t> counts) {
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(counts.size(), 64); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(counts[i]);
  return counts.size() > 64 ? text + ", ..." : text;
}

void warn_once(const std::string& group, const std::string& why) {
  static std::mutex mutex;
  static auto* told = new std::set<std::string>();
  {
    std::lock_guard lock(mutex);
    if (!told->insert(why).second) return;
  }
  warn("fccl: group " + group + " does not use shared memory: " + why +
       ". Its CPU collectives go through Gloo, which is right but slower.");
}

}  // namespace

void Carrier::wait_for(::c10d::Work& work, const Deadline& deadline) {
  try {
    wait_in_slices(work, deadline);
  } catch (...) {
    if (!work.isCompleted()) left_behind_.push_back(c10::intrusive_ptr<::c10d::Work>::reclaim_copy(&work));
    throw;
  }
}

void Carrier::wait_in_slices(::c10d::Work& work, const Deadline& deadline) {
  for (;;) {
    try {
      work.wait(std::max(deadline.left(kSlice), std::chrono::milliseconds(1)));
      return;
    } catch (...) {
      // The end of a slice and a failure of the operation both throw; only the latter completes it.
      if (deadline.expired() && !work.isCompleted()) throw;
    }
    if (work.isCompleted()) {  // perhaps just after the slice had ended: its own result counts
      work.wait();
      return;
    }
    throw_if_failed();
    if (mode() == Mode::kEngine) {
      if (const auto trouble = group_->trouble_of_a_peer())
        throw Error(ErrorKind::kPeerFailed, place() + *trouble);
    }
    check_interrupt();
  }
}

std::string Carrier::place() const {
  return "rank " + std::to_string(rank_) + " of group '" + group_name_ + "': ";
}

// Called while the exception is handled.
void Carrier::fail_locally(Collective collective, std::uint64_t before, bool interrupted,
                           const Deadline& deadline) {
  if (group_ == nullptr) return;
  std::string what = "an exception that is not a std::exception";
  bool local = false;  // torch's or the standard library's, so of this rank's own making
  try {
    throw;
  } catch (const c10::Error& error) {
    local = true;
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    local = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
    what = error.what();
  } catch (...) {
  }
  const std::string where = std::string("fccl ") + name_of(collective) + " on " + place();
  if (interrupted) {
    group_->abort(where + "interrupted");
    return;
  }
  if (group_->failure()) return;
  if (deadline.expired()) {
    // Its own deadline passed where the message names neither call nor rank.
    const std::string text = where + "timed out after " + std::to_string(deadline.span().count()) +
                             " ms in the inner engine (Gloo): " + what;
    group_->abort(text);
    throw Error(ErrorKind::kTimeout, text);
  }
  if (sequence_number() == before) {
    reject("failed on this rank: " + what, deadline);
    return;
  }
  // Behind the gate the peers are in the middle of it, and cannot be told to leave it as if it had not
  // been made. On the engine they see at once that this rank has failed.
  if (!local) {  // the inner backend's: a connection was lost, say
    const std::string text = where + "failed in the inner engine (Gloo): " + what;
    group_->abort(text);
    throw Error(ErrorKind::kPeerFailed, text);
  }
  group_->abort(where + "failed half-way: " + what);
}

Carrier::Carrier(int rank, int size, std::string group_name, const c10::intrusive_ptr<::c10d::Store>& store,
                 const InnerFactory& make_inner, std::chrono::milliseconds timeout,
                 std::function<void()> on_failure, std::uint64_t word)
    : rank_(rank), size_(size), group_name_(std::move(group_name)), words_{word} {
  if (size == 1) {
    why_inner_ = "the group has one rank";
    return;
  }
  const auto adapter =
      std::make_shared<StoreAdapter>(c10::make_intrusive<::c10d::PrefixStore>("engine", store));
  cpu::GroupConfig config;
  config.rank = rank;
  config.world_size = size;
  config.name = group_name_;
  config.store = adapter;
  config.on_failure = std::move(on_failure);
  config.word = word;
  group_ = std::make_unique<cpu::Group>(std::move(config));
  const bool shared = group_->connect(Deadline::after(timeout));
  adapter->release();
  words_ = group_->words();
  mode_ = shared ? Mode::kEngine : Mode::kInner;
  if (shared) return;
  why_inner_ = group_->why_not();
  if (rank_ == 0) warn_once(group_name_, why_inner_);
  inner_ = make_inner(store);
}

Carrier::~Carrier() {
  if (std::all_of(left_behind_.begin(), left_behind_.end(),
                  [](const auto& work) { return work->isCompleted(); }))
    return;
  // Gloo's destructor waits for what is under way, for as long as that may take; nobody should wait for it.
  auto* inner = new BackendPtr(std::move(inner_));
  try {
    SignalsBlocked blocked;
    std::thread([inner] { delete inner; }).detach();
  } catch (const std::system_error&) {
    // Left as it is, until the process ends.
  }
}

void Carrier::all_reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op,
                         const Deadline& deadline) {
  switch (mode()) {
    case Mode::kEngine: group_->all_reduce(input, output, count, dtype, op, deadline); break;
    case Mode::kInner: inner_all_reduce(input, output, count, dtype, op, deadline); break;
    default: reduce_alone(input, output, count, dtype);
  }
}

void Carrier::reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op, int root,
                     const Deadline& deadline) {
  switch (mode()) {
    case Mode::kEngine: group_->reduce(input, output, count, dtype, op, root, deadline); break;
    case Mode::kInner: inner_reduce(input, output, count, dtype, op, root, deadline); break;
    default: reduce_alone(input, output, count, dtype);
  }
}

void Carrier::reduce_scatter(std::span<const void* const> inputs, std::span<const std::size_t> counts,
                             void* output, DType dtype, ReduceOp op, const Deadline& deadline) {
  try {
    switch (mode()) {
      case Mode::kEngine: group_->reduce_scatter(inputs, counts, output, dtype, op, deadline); break;
      case Mode::kInner: inner_reduce_scatter(inputs, counts, output, dtype, op, deadline); break;
      default: reduce_alone(inputs[0], output, counts[0], dtype);
    }
  } catch (const Error& error) {
    // Ranks compare fingerprints of the sizes; each can name its own.
    if (error.kind() != ErrorKind::kMismatch) throw;
    throw Error(error.kind(), std::string(error.what()) + " The sizes on this rank: " + list(counts) + ".");
  }
}

void Carrier::all_to_all(const cpu::Group::Pieces& pieces, DType dtype, const Deadline& deadline) {
  switch (mode()) {
    case Mode::kEngine: group_->all_to_all(pieces, dtype, deadline); break;
    case Mode::kInner: inner_all_to_all(pieces, dtype, deadline); break;
    default:
      if (pieces.input_counts[0] != pieces.output_counts[0]) {
        throw Error(ErrorKind::kInvalid,
                    "fccl all_to_all on rank 0: " + std::to_string(pieces.input_counts[0]) +
                        " elements are sent and " + std::to_string(pieces.output_counts[0]) + " expected");
      }
      copy_alone(pieces.inputs[0], pieces.outputs[0], pieces.input_counts[0], dtype);
  }
}

void Carrier::gather(const void* input, std::span<void* const> outputs, std::size_t count, DType dtype,
                     int root, const Deadline& deadline) {
  switch (mode()) {
    case Mode::kEngine: group_->gather(input, outputs, count, dtype, root, deadline); break;
    case Mode::kInner: inner_gather(input, outputs, count, dtype, root, deadline); break;
    default: copy_alone(input, outputs[0], count, dtype);
  }
}

void Carrier::scatter(std::span<const void* const> inputs, void* output, std::size_t count, DType dtype,
                      int root, const Deadline& deadline) {
  switch (mode()) {
    case Mode::kEngine: group_->scatter(inputs, output, count, dtype, root, deadline); break;
    case Mode::kInner: inner_scatter(inputs, output, count, dtype, root, deadline); break;
    default: copy_alone(inputs[0], output, count, dtype);
  }
}

void Carrier::all_gather(const void* input, std::span<void* const> outputs,
                         std::span<const std::size_t> counts, DType dtype, bool uneven,
                         const Deadline& deadline) {
  switch (mode()) {
    case Mode::kEngine: group_->all_gather(input, outputs, counts, dtype, uneven, deadline); break;
    case Mode::kInner: inner_all_gather(input, outputs, counts, dtype, uneven, deadline); break;
    default: copy_alone(input, outputs[0], counts[0], dtype);
  }
}

void Carrier::broadcast(void* buffer, std::size_t count, DType dtype, int root, const Deadline& deadline) {
  switch (mode()) {
    case Mode::kEngine: group_->broadcast(buffer, count, dtype, root, deadline); break;
    case Mode::kInner: inner_broadcast(buffer, count, dtype, root, deadline); break;
    default: break;
  }
}

void Carrier::barrier(const Deadline& deadline) {
  switch (mode()) {
    case Mode::kEngine: group_->barrier(deadline); break;
    case Mode::kInner:
      // Once everyone has come, that is all.
      inner_gate(Description::of(Collective::kBarrier, DType::kBytes, 0), deadline);
      break;
    default: break;
  }
}

void Carrier::gate(const Description& call, const Deadline& deadline) {
  switch (mode()) {
    case Mode::kEngine: group_->gate(call, deadline); break;
    case Mode::kInner: inner_gate(call, deadline); break;
    default: break;
  }
}

void Carrier::reject(const std::string& why, const Deadline& deadline) {
  switch (mode()) {
    case Mode::kEngine: group_->reject(why, deadline); break;
    case Mode::kInner: inner_reject(why); break;
    default: break;
  }
}

std::map<std::string, std::int64_t> Carrier::counts() const {
  std::map<std::string, std::int64_t> counts;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    const auto collective = static_cast<Collective>(i);
    if (collective == Collective::kNone || collective == Collective::kRejected) continue;
    counts[collective == Collective::kSparseAllReduce ? "all_reduce_sparse" : name_of(collective)] =
        counts_[i];
  }
  return counts;
}

void Carrier::forget() noexcept {
  (void)group_.release();
  (void)inner_.release();
}

}  // namespace fccl::c10d_backend
