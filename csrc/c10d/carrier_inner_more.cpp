// Over the inner backend (Gloo): reduce, reduce_scatter, and the collectives that move pieces. As in
// carrier_inner.cpp, calls are compared before any data moves, private copies are made before that, and
// Gloo sees contiguous bytes only: its dtype list and its faults with unequal sizes do not reach the user.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "c10d/carrier.h"
#include "c10d/tensors.h"

namespace fccl::c10d_backend {
namespace {

at::Tensor private_bytes(std::size_t size) { return at::empty({static_cast<std::int64_t>(size)}, at::kByte); }

at::Tensor private_copy(const void* data, std::size_t size) {
  at::Tensor bytes = private_bytes(size);
  if (size != 0) std::memcpy(bytes.mutable_data_ptr(), data, size);
  return bytes;
}

void copy_out(const at::Tensor& bytes, std::size_t at, void* to, std::size_t size) {
  if (size != 0) std::memcpy(to, static_cast<const char*>(bytes.const_data_ptr()) + at, size);
}

std::size_t sum(std::span<const std::size_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

std::vector<std::int64_t> in_bytes(std::span<const std::size_t> counts, std::size_t width) {
  std::vector<std::int64_t> sizes;
  for (const std::size_t count : counts) sizes.push_back(static_cast<std::int64_t>(count * width));
  return sizes;
}

}  // namespace

// More bytes move than needed, but the numbers are those of all_reduce: averages work, and 16-bit floats are
// rounded once.
void Carrier::inner_reduce(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op,
                           int root, const Deadline& deadline) {
  PlainDispatch guard;
  const bool receives = rank_ == root;
  const at::Tensor other = receives ? at::Tensor() : private_bytes(count * size_of(dtype));
  inner_gate(Description::of(Collective::kReduce, dtype, count, root, op), deadline);
  inner_all_reduce(input, receives ? output : other.mutable_data_ptr(), count, dtype, op, deadline);
}

void Carrier::inner_reduce_scatter(std::span<const void* const> inputs, std::span<const std::size_t> counts,
                                   void* output, DType dtype, ReduceOp op, const Deadline& deadline) {
  PlainDispatch guard;
  const std::size_t width = size_of(dtype);
  const at::Tensor flat = private_bytes(sum(counts) * width);
  auto* data = static_cast<char*>(flat.mutable_data_ptr());
  std::size_t at = 0;
  std::size_t mine = 0;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    if (r == static_cast<std::size_t>(rank_)) mine = at;
    if (counts[r] != 0) std::memcpy(data + at, inputs[r], counts[r] * width);
    at += counts[r] * width;
  }
  inner_gate(cpu::describe_reduce_scatter(counts, dtype, op), deadline);
  inner_all_reduce(data, data, sum(counts), dtype, op, deadline);
  copy_out(flat, mine, output, counts[static_cast<std::size_t>(rank_)] * width);
}

void Carrier::inner_all_to_all(const cpu::Group::Pieces& pieces, DType dtype, const Deadline& deadline) {
  PlainDispatch guard;
  const std::size_t width = size_of(dtype);
  const auto size = static_cast<std::size_t>(size_);
  at::Tensor from = private_bytes(sum(pieces.input_counts) * width);
  at::Tensor to = private_bytes(sum(pieces.output_counts) * width);
  char* put = static_cast<char*>(from.mutable_data_ptr());
  for (std::size_t r = 0; r < size; ++r) {
    const std::size_t bytes = pieces.input_counts[r] * width;
    if (bytes != 0) std::memcpy(put, pieces.inputs[r], bytes);
    put += bytes;
  }
  Description call = Description::of(Collective::kAllToAll, dtype, sum(pieces.input_counts));
  call.flags = Description::kUneven;
  inner_gate(call, deadline);

  // Every rank learns what every rank sends and expects, so all of them see a misfit alike.
  std::vector<std::int64_t> row = in_bytes(pieces.input_counts, 1);
  const std::vector<std::int64_t> expects = in_bytes(pieces.output_counts, 1);
  row.insert(row.end(), expects.begin(), expects.end());
  std::vector<std::int64_t> table(2 * size * size);
  std::vector<void*> places(size);
  for (std::size_t r = 0; r < size; ++r) places[r] = table.data() + 2 * size * r;
  inner_all_gather(row.data(), places, std::vector<std::size_t>(size, 2 * size), DType::kInt64, false,
                   deadline);
  std::int64_t total = 0;
  for (std::size_t sender = 0; sender < size; ++sender) {
    for (std::size_t receiver = 0; receiver < size; ++receiver) {
      const std::int64_t sent = table[2 * size * sender + receiver];
      const std::int64_t expected = table[2 * size * receiver + size + sender];
      total += sent;
      if (sent == expected) continue;
      throw Error(ErrorKind::kMismatch,
                  "fccl " + call.to_string() + " on rank " + std::to_string(rank_) + " of group '" +
                      group_name_ + "': rank " + std::to_string(sender) + " sends " + std::to_string(sent) +
                      " elements to rank " + std::to_string(receiver) + ", which expects " +
                      std::to_string(expected) + ". No data was exchanged and the group stays usable.");
    }
  }
  if (total == 0) return;
  std::vector<std::int64_t> sends_bytes = in_bytes(pieces.input_counts, width);
  std::vector<std::int64_t> expects_bytes = in_bytes(pieces.output_counts, width);
  ::c10d::AllToAllOptions options;
  options.timeout = inner_timeout(deadline);
  wait_for(*inner_->alltoall_base(to, from, expects_bytes, sends_bytes, options), deadline);
  std::size_t at = 0;
  for (std::size_t r = 0; r < size; ++r) {
    copy_out(to, at, pieces.outputs[r], pieces.output_counts[r] * width);
    at += pieces.output_counts[r] * width;
  }
}

void Carrier::inner_gather(const void* input, std::span<void* const> outputs, std::size_t count, DType dtype,
                           int root, const Deadline& deadline) {
  PlainDispatch guard;
  const std::size_t bytes = count * size_of(dtype);
  std::vector<at::Tensor> in{private_copy(input, bytes)};
  std::vector<std::vector<at::Tensor>> out;
  if (rank_ == root) {
    out.emplace_back();
    for (int r = 0; r < size_; ++r) out[0].push_back(private_bytes(bytes));
  }
  inner_gate(Description::of(Collective::kGather, dtype, count, root), deadline);
  if (count == 0) return;
  ::c10d::GatherOptions options;
  options.rootRank = root;
  options.timeout = inner_timeout(deadline);
  wait_for(*inner_->gather(out, in, options), deadline);
  for (std::size_t r = 0; !out.empty() && r < outputs.size(); ++r) copy_out(out[0][r], 0, outputs[r], bytes);
}

void Carrier::inner_scatter(std::span<const void* const> inputs, void* output, std::size_t count, DType dtype,
                            int root, const Deadline& deadline) {
  PlainDispatch guard;
  const std::size_t bytes = count * size_of(dtype);
  std::vector<at::Tensor> out{private_bytes(bytes)};
  std::vector<std::vector<at::Tensor>> in;
  if (rank_ == root) {
    in.emplace_back();
    for (const void* input : inputs) in[0].push_back(private_copy(input, bytes));
  }
  inner_gate(Description::of(Collective::kScatter, dtype, count, root), deadline);
  if (count == 0) return;
  ::c10d::ScatterOptions options;
  options.rootRank = root;
  options.timeout = inner_timeout(deadline);
  wait_for(*inner_->scatter(out, in, options), deadline);
  copy_out(out[0], 0, output, bytes);
}

void Carrier::all_to_all_equal(const at::Tensor& input, const at::Tensor& output, const Deadline& deadline) {
  PlainDispatch guard;
  if (mode() == Mode::kInner) {
    at::Tensor from = input;
    at::Tensor to = output;
    std::vector<std::int64_t> even;
    ::c10d::AllToAllOptions options;
    options.timeout = inner_timeout(deadline);
    wait_for(*inner_->alltoall_base(to, from, even, even, options), deadline);
    return;
  }
  const auto size = static_cast<std::size_t>(size_);
  const std::vector<std::size_t> counts(size, byte_count(input) / size);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (std::size_t r = 0; r < size; ++r) {
    inputs.push_back(static_cast<const char*>(input.const_data_ptr()) + r * counts[r]);
    outputs.push_back(static_cast<char*>(output.mutable_data_ptr()) + r * counts[r]);
  }
  all_to_all({inputs, counts, outputs, counts}, DType::kBytes, deadline);
}

void Carrier::all_gather_equal(const at::Tensor& input, const at::Tensor& output, const Deadline& deadline) {
  PlainDispatch guard;
  if (mode() == Mode::kInner) {
    at::Tensor from = input;
    at::Tensor to = output;
    ::c10d::AllgatherOptions options;
    options.timeout = inner_timeout(deadline);
    wait_for(*inner_->_allgather_base(to, from, options), deadline);
    return;
  }
  const auto size = static_cast<std::size_t>(size_);
  const std::vector<std::size_t> counts(size, byte_count(input));
  std::vector<void*> outputs;
  for (std::size_t r = 0; r < size; ++r)
    outputs.push_back(static_cast<char*>(output.mutable_data_ptr()) + r * counts[r]);
  all_gather(input.const_data_ptr(), outputs, counts, DType::kBytes, false, deadline);
}

}  // namespace fccl::c10d_backend
