#include "c10d/carrier.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "c10d/process.h"
#include "c10d/tensors.h"

namespace fccl::c10d_backend {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(100);

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return at::kFloat;
    case DType::kFloat64: return at::kDouble;
    case DType::kFloat16: return at::kHalf;
    case DType::kBFloat16: return at::kBFloat16;
    case DType::kInt8: return at::kChar;
    case DType::kInt16: return at::kShort;
    case DType::kInt32: return at::kInt;
    case DType::kInt64: return at::kLong;
    case DType::kBool: return at::kBool;
    default: return at::kByte;
  }
}

at::Tensor tensor_at(const void* data, std::size_t count, DType dtype) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(count)},
                       at::TensorOptions().dtype(scalar_type_of(dtype)));
}

::c10d::ReduceOp::RedOpType torch_op(ReduceOp op) {
  return static_cast<::c10d::ReduceOp::RedOpType>(op);  // one order in both enumerations
}
static_assert(static_cast<int>(ReduceOp::kAvg) == ::c10d::ReduceOp::AVG &&
              static_cast<int>(ReduceOp::kBxor) == ::c10d::ReduceOp::BXOR);

std::chrono::milliseconds timeout_for(const Deadline& deadline) {
  return std::max(deadline.left(std::chrono::hours(24)), std::chrono::milliseconds(1));
}

// Bool as the engine has it: any true byte is 1; sums are OR and products AND.
void normalise_bool(const void* input, void* output, std::size_t count) {
  const auto* from = static_cast<const unsigned char*>(input);
  auto* to = static_cast<unsigned char*>(output);
  for (std::size_t i = 0; i < count; ++i) to[i] = from[i] != 0;
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
  for (;;) {
    try {
      work.wait(std::max(deadline.left(kSlice), std::chrono::milliseconds(1)));
      return;
    } catch (...) {
      // The end of a slice and a failure of the operation both throw; only the latter completes it.
      if (work.isCompleted() || deadline.expired()) throw;
    }
    throw_if_failed();
    check_interrupt();
  }
}

// Called while the exception is handled.
void Carrier::fail_locally(Collective collective, std::uint64_t before, const Deadline& deadline) {
  if (group_ == nullptr) return;
  std::string what = "an exception that is not a std::exception";
  bool torchs = false;
  try {
    throw;
  } catch (const c10::Error& error) {
    torchs = true;
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    torchs = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
    what = error.what();
  } catch (...) {
  }
  const std::string where = std::string("fccl ") + name_of(collective) + " on rank " + std::to_string(rank_) +
                            " of group '" + group_name_ + "'";
  if (deadline.expired()) {
    // Its own deadline passed inside the inner engine, whose message names neither call nor rank.
    const std::string text = where + ": timed out after " + std::to_string(deadline.span().count()) +
                             " ms in the inner engine (Gloo): " + what;
    group_->abort(text);
    throw Error(ErrorKind::kTimeout, text);
  }
  if (!torchs) {  // Ctrl-C
    group_->abort(where + " was interrupted");
    return;
  }
  if (group_->sequence_number() == before) {
    reject("failed on this rank: " + what, deadline);
    return;
  }
  // Behind the gate: what Gloo refuses, it refuses on every rank alike; but a collective composed of the
  // engine's has been left half-way, and the peers are in the other half.
  const bool composed = collective != Collective::kGather && collective != Collective::kScatter &&
                        collective != Collective::kAllToAll && collective != Collective::kSparseAllReduce;
  if (composed && mode() == Mode::kEngine) group_->abort(where + " failed half-way: " + what);
}

Carrier::Carrier(int rank, int size, std::string group_name, const c10::intrusive_ptr<::c10d::Store>& store,
                 BackendPtr inner)
    : rank_(rank), size_(size), group_name_(std::move(group_name)), inner_(std::move(inner)) {
  if (size == 1) {
    mode_ = Mode::kLocal;
    why_inner_ = "the group has one rank";
    return;
  }
  store_ = std::make_shared<StoreAdapter>(store);
  cpu::GroupConfig config;
  config.rank = rank;
  config.world_size = size;
  config.name = group_name_;
  config.store = store_;
  group_ = std::make_unique<cpu::Group>(std::move(config));
}

Carrier::Mode Carrier::connect(const Deadline& deadline) {
  if (const Mode known = mode(); known != Mode::kUnconnected) return known;
  const bool shared = group_->connect(deadline);
  store_->release();
  if (!shared) {
    {
      std::lock_guard lock(why_mutex_);
      why_inner_ = group_->why_not();
    }
    if (rank_ == 0) warn_once(group_name_, group_->why_not());
  }
  mode_.store(shared ? Mode::kEngine : Mode::kInner, std::memory_order_release);
  return mode();
}

std::string Carrier::why_inner() const {
  std::lock_guard lock(why_mutex_);
  return why_inner_;
}

void Carrier::all_reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op,
                         const Deadline& deadline) {
  switch (connect(deadline)) {
    case Mode::kEngine: group_->all_reduce(input, output, count, dtype, op, deadline); break;
    case Mode::kInner: inner_all_reduce(input, output, count, dtype, op, deadline); break;
    default:
      if (dtype == DType::kBool) {
        normalise_bool(input, output, count);
      } else if (input != output && count != 0) {
        std::memcpy(output, input, count * size_of(dtype));
      }
  }
}

// Gloo rounds 16-bit floats at every hop, has no averages of integers, no int16 and a bool sum that
// stores the byte 2; so the sum is formed in a wider private buffer and rounded once.
void Carrier::inner_all_reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op,
                               const Deadline& deadline) {
  if (count == 0) return;
  PlainDispatch guard;
  const at::Tensor from = tensor_at(input, count, dtype);
  at::Tensor to = tensor_at(output, count, dtype);
  at::Tensor wide;
  ReduceOp wide_op = op == ReduceOp::kAvg ? ReduceOp::kSum : op;
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16: wide = from.to(at::kFloat); break;
    case DType::kBool:
      wide = from.view(at::kByte).ne(0).to(at::kByte);
      if (op == ReduceOp::kSum) wide_op = ReduceOp::kMax;
      if (op == ReduceOp::kProduct) wide_op = ReduceOp::kMin;
      break;
    case DType::kInt16: wide = from.to(op == ReduceOp::kAvg ? at::kLong : at::kInt); break;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kInt32: wide = op == ReduceOp::kAvg ? from.to(at::kLong) : from.clone(); break;
    default: wide = from.clone();
  }
  std::vector<at::Tensor> tensors{wide};
  ::c10d::AllreduceOptions options;
  options.reduceOp = torch_op(wide_op);
  options.timeout = timeout_for(deadline);
  wait_for(*inner_->allreduce(tensors, options), deadline);
  if (op == ReduceOp::kAvg) {
    if (at::isFloatingType(wide.scalar_type())) {
      wide.div_(size_);
    } else {
      wide.div_(size_, "trunc");
    }
  }
  to.copy_(dtype == DType::kBool ? wide.view(at::kBool) : wide);
}

void Carrier::all_gather(const void* input, std::span<void* const> outputs,
                         std::span<const std::size_t> counts, DType dtype, bool uneven,
                         const Deadline& deadline) {
  const std::size_t width = size_of(dtype);
  const auto mine = static_cast<std::size_t>(rank_);
  switch (connect(deadline)) {
    case Mode::kEngine: group_->all_gather(input, outputs, counts, dtype, uneven, deadline); break;
    case Mode::kInner: {
      // Gloo wants equal sizes: everyone sends the largest one.
      PlainDispatch guard;
      const std::size_t largest = *std::max_element(counts.begin(), counts.end()) * width;
      if (largest == 0) return;
      at::Tensor all = at::empty({static_cast<std::int64_t>(largest) * size_}, at::kByte);
      at::Tensor own = at::zeros({static_cast<std::int64_t>(largest)}, at::kByte);
      std::memcpy(own.mutable_data_ptr(), input, counts[mine] * width);
      ::c10d::AllgatherOptions options;
      options.timeout = timeout_for(deadline);
      wait_for(*inner_->_allgather_base(all, own, options), deadline);
      for (std::size_t r = 0; r < outputs.size(); ++r) {
        if (counts[r] == 0) continue;
        std::memcpy(outputs[r], static_cast<const char*>(all.const_data_ptr()) + r * largest,
                    counts[r] * width);
      }
      break;
    }
    default:
      if (outputs[0] != input && counts[0] != 0) std::memmove(outputs[0], input, counts[0] * width);
  }
}

void Carrier::broadcast(void* buffer, std::size_t count, DType dtype, int root, const Deadline& deadline) {
  switch (connect(deadline)) {
    case Mode::kEngine: group_->broadcast(buffer, count, dtype, root, deadline); break;
    case Mode::kInner: {
      if (count == 0) return;
      // A private buffer: Gloo may go on with it after our wait was given up.
      PlainDispatch guard;
      const std::size_t bytes = count * size_of(dtype);
      std::vector<at::Tensor> tensors{at::empty({static_cast<std::int64_t>(bytes)}, at::kByte)};
      if (root == rank_) std::memcpy(tensors[0].mutable_data_ptr(), buffer, bytes);
      ::c10d::BroadcastOptions options;
      options.rootRank = root;
      options.timeout = timeout_for(deadline);
      wait_for(*inner_->broadcast(tensors, options), deadline);
      if (root != rank_) std::memcpy(buffer, tensors[0].const_data_ptr(), bytes);
      break;
    }
    default: break;
  }
}

void Carrier::barrier(const Deadline& deadline) {
  switch (connect(deadline)) {
    case Mode::kEngine: group_->barrier(deadline); break;
    case Mode::kInner: {
      ::c10d::BarrierOptions options;
      options.timeout = timeout_for(deadline);
      wait_for(*inner_->barrier(options), deadline);
      break;
    }
    default: break;
  }
}

void Carrier::gate(const Description& call, const Deadline& deadline) {
  if (connect(deadline) == Mode::kEngine) group_->gate(call, deadline);
}

void Carrier::reject(const std::string& why, const Deadline& deadline) {
  if (connect(deadline) == Mode::kEngine) group_->reject(why, deadline);
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
