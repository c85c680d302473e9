// Where ranks do not share memory: collectives over the inner backend (Gloo).
//
// As on the engine, calls are compared before any data moves: each is preceded by an all_gather of the
// ranks' descriptions, whose size never differs. Gloo alone would mix up calls that do not fit, or end the
// process. The price is one small exchange per call, which is little beside what Gloo takes for the data.
#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "c10d/carrier.h"
#include "c10d/tensors.h"

namespace fccl::c10d_backend {
namespace {

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

at::Tensor as_bytes(const Description& call) {
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(sizeof(call))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &call, sizeof(call));
  return bytes;
}

}  // namespace

c10::intrusive_ptr<::c10d::Work> Carrier::send_description(const Description& call, at::Tensor& all,
                                                           const Deadline& deadline) {
  ++inner_sequence_;
  at::Tensor own = as_bytes(call);
  all = at::empty({own.numel() * size_}, at::kByte);
  ::c10d::AllgatherOptions options;
  options.timeout = inner_timeout(deadline);
  return inner_->_allgather_base(all, own, options);
}

void Carrier::inner_gate(const Description& call, const Deadline& deadline) {
  PlainDispatch guard;
  at::Tensor all;
  wait_for(*send_description(call, all, deadline), deadline);
  std::vector<Description> calls(static_cast<std::size_t>(size_));
  std::memcpy(calls.data(), all.const_data_ptr(), calls.size() * sizeof(Description));
  for (Description& each : calls) each.validate();
  const std::string verdict = check_compatible(calls);
  if (verdict.empty()) return;
  throw Error(ErrorKind::kMismatch,
              "fccl " + call.to_string() + ", collective #" + std::to_string(inner_sequence_) + " of rank " +
                  std::to_string(rank_) + " of group '" + group_name_ + "': " + verdict);
}

// Not waited for: this rank's call fails at once, whenever its peers come. Nor may it expire, as that would
// end Gloo's connections: shutdown() ends what is still pending.
void Carrier::inner_reject(const std::string& why) {
  PlainDispatch guard;
  at::Tensor all;
  left_behind_.erase(std::remove_if(left_behind_.begin(), left_behind_.end(),
                                    [](const auto& work) { return work->isCompleted(); }),
                     left_behind_.end());
  left_behind_.push_back(send_description(Description::rejected(why), all, Deadline()));
}

// Gloo rounds 16-bit floats at every hop, has no averages of integers, no int16 and a bool sum that
// stores the byte 2; so the sum is formed in a wider private buffer and rounded once.
void Carrier::inner_all_reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op,
                               const Deadline& deadline) {
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
  // Gloo's min and max drop a NaN or keep it, as its order has it; the engine's keep it.
  const bool ordered = wide_op == ReduceOp::kMin || wide_op == ReduceOp::kMax;
  const bool may_be_nan = ordered && at::isFloatingType(wide.scalar_type());
  const at::Tensor nan = may_be_nan ? at::isnan(wide).to(at::kByte) : at::Tensor();
  // After the private copies: without memory for them, the call is a refused one.
  inner_gate(Description::of(Collective::kAllReduce, dtype, count, -1, op), deadline);
  if (count == 0) return;
  const auto reduce = [&](const at::Tensor& tensor, ReduceOp with) {
    std::vector<at::Tensor> tensors{tensor};
    ::c10d::AllreduceOptions options;
    options.reduceOp = torch_op(with);
    options.timeout = inner_timeout(deadline);
    wait_for(*inner_->allreduce(tensors, options), deadline);
  };
  reduce(wide, wide_op);
  if (may_be_nan) {
    reduce(nan, ReduceOp::kMax);
    wide.masked_fill_(nan.ne(0), std::numeric_limits<double>::quiet_NaN());
  }
  if (op == ReduceOp::kAvg) {
    if (at::isFloatingType(wide.scalar_type())) {
      wide.div_(size_);
    } else {
      wide.div_(size_, "trunc");
    }
  }
  to.copy_(dtype == DType::kBool ? wide.view(at::kBool) : wide);
}

void Carrier::inner_all_gather(const void* input, std::span<void* const> outputs,
                               std::span<const std::size_t> counts, DType dtype, bool uneven,
                               const Deadline& deadline) {
  // Gloo wants equal sizes: everyone sends the largest one.
  PlainDispatch guard;
  const std::size_t width = size_of(dtype);
  const std::size_t largest = *std::max_element(counts.begin(), counts.end()) * width;
  at::Tensor all = at::empty({static_cast<std::int64_t>(largest) * size_}, at::kByte);
  at::Tensor own = at::zeros({static_cast<std::int64_t>(largest)}, at::kByte);
  std::memcpy(own.mutable_data_ptr(), input, counts[static_cast<std::size_t>(rank_)] * width);
  inner_gate(cpu::describe_all_gather(counts, rank_, dtype, uneven), deadline);
  if (largest == 0) return;
  ::c10d::AllgatherOptions options;
  options.timeout = inner_timeout(deadline);
  wait_for(*inner_->_allgather_base(all, own, options), deadline);
  for (std::size_t r = 0; r < outputs.size(); ++r) {
    if (counts[r] == 0) continue;
    std::memcpy(outputs[r], static_cast<const char*>(all.const_data_ptr()) + r * largest, counts[r] * width);
  }
}

void Carrier::inner_broadcast(void* buffer, std::size_t count, DType dtype, int root,
                              const Deadline& deadline) {
  // A private buffer: Gloo may go on with it after our wait was given up.
  PlainDispatch guard;
  const std::size_t bytes = count * size_of(dtype);
  std::vector<at::Tensor> tensors{at::empty({static_cast<std::int64_t>(bytes)}, at::kByte)};
  if (root == rank_) std::memcpy(tensors[0].mutable_data_ptr(), buffer, bytes);
  inner_gate(Description::of(Collective::kBroadcast, dtype, count, root), deadline);
  if (count == 0) return;
  ::c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = inner_timeout(deadline);
  wait_for(*inner_->broadcast(tensors, options), deadline);
  if (root != rank_) std::memcpy(buffer, tensors[0].const_data_ptr(), bytes);
}

}  // namespace fccl::c10d_backend
