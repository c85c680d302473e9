// reduce and reduce_scatter, composed from all_reduce into private memory.
//
// More bytes move than needed, but the numbers are the engine's: averages work, 16-bit floats are
// rounded once, and results equal all_reduce's to the bit. Gloo does no better (its reduce_scatter
// is one all-reduce per rank) and overwrites the input of reduce. To be replaced when the engine has
// a reduce_scatter of its own.
#include <cstring>
#include <numeric>
#include <utility>

#include "c10d/backend.h"

namespace fccl::c10d_backend {
namespace {

using ::c10d::OpType;

void all_reduce_into(Carrier& carrier, const at::Tensor& input, const at::Tensor& output,
                     const Reduction& reduction, const Deadline& deadline) {
  carrier.all_reduce(input.const_data_ptr(), output.mutable_data_ptr(),
                     static_cast<std::size_t>(input.numel()) * reduction.per_element, reduction.dtype,
                     reduction.op, deadline);
}

at::Tensor prepared(const at::Tensor& input, const Reduction& reduction) {
  return reduction.premultiply ? premultiplied(input, reduction) : readable(input);
}

// Splits that are not all alike are compared element by element: their sum alone would let ranks
// cut one total at different places.
void check_splits(Carrier& carrier, const std::vector<std::int64_t>& splits, const Deadline& deadline) {
  const std::size_t size = splits.size();
  std::vector<std::int64_t> all(size * size);
  std::vector<void*> places(size);
  for (std::size_t r = 0; r < size; ++r) places[r] = all.data() + r * size;
  const std::vector<std::size_t> counts(size, size);
  carrier.all_gather(splits.data(), places, counts, DType::kInt64, false, deadline);
  for (std::size_t r = 1; r < size; ++r) {
    for (std::size_t i = 0; i < size; ++i) {
      if (all[r * size + i] == all[i]) continue;
      throw Error(ErrorKind::kMismatch,
                  "reduce_scatter on rank " + std::to_string(carrier.rank()) + ": rank 0 has " +
                      std::to_string(all[i]) + " elements for rank " + std::to_string(i) + ", rank " +
                      std::to_string(r) + " has " + std::to_string(all[r * size + i]) +
                      "; expected the same sizes on every rank. The group stays usable.");
    }
  }
}

void reduce_scatter_one(Carrier& carrier, const at::Tensor& output, const at::Tensor& input,
                        const Reduction& reduction, std::int64_t begin, const Deadline& deadline) {
  PlainDispatch guard;
  const at::Tensor from = prepared(input, reduction);
  const at::Tensor sum = scratch(input.numel(), input);
  all_reduce_into(carrier, from, sum, reduction, deadline);
  at::Tensor target = output;
  target.copy_(sum.narrow(0, begin, output.numel()).view(output.sizes()));
}

}  // namespace

FcclBackend::WorkPtr FcclBackend::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  const Call c = call(OpType::REDUCE, Collective::kReduce, "fccl:reduce", opts.asyncOp, opts.timeout);
  const at::Tensor& tensor = only(c, tensors, "input");
  if (tensor.is_cuda()) return cuda(c, tensor).reduce(tensors, opts);
  check_dense(c, tensor, "input");
  check_root(c, opts.rootRank);
  const int root = static_cast<int>(opts.rootRank);
  if (root == rank_) check_written(c, tensor, "input");
  Reduction reduction = check_reduction(c, tensor, opts.reduceOp);
  return submit(c, tensors, tensors,
                [tensor, root, reduction = std::move(reduction)](Carrier& carrier, const Deadline& deadline) {
                  Description gate;
                  gate.collective = Collective::kReduce;
                  gate.dtype = dtype_of(tensor.scalar_type());
                  gate.reduce_op = reduction.op;
                  gate.root = root;
                  gate.count = static_cast<std::uint64_t>(tensor.numel());
                  carrier.gate(gate, deadline);
                  const at::Tensor from = prepared(tensor, reduction);
                  const bool receives = carrier.rank() == root;
                  const at::Tensor to = receives ? writable(tensor) : scratch(tensor.numel(), tensor);
                  all_reduce_into(carrier, from, to, reduction, deadline);
                  if (receives) put_back(to, tensor);
                });
}

FcclBackend::WorkPtr FcclBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                 const ::c10d::ReduceScatterOptions& opts) {
  const Call c = call(OpType::REDUCE_SCATTER, Collective::kReduceScatter, "fccl:reduce_scatter", opts.asyncOp,
                      opts.timeout);
  const at::Tensor& output = only(c, outputs, "output");
  check_length(c, inputs.size(), 1, "lists of input tensors");
  if (output.is_cuda()) return cuda(c, output).reduce_scatter(outputs, inputs, opts);
  check_length(c, inputs[0].size(), static_cast<std::size_t>(size_), "input tensors");
  check_dense(c, output, "output");
  check_written(c, output, "output");
  std::vector<std::int64_t> splits;
  bool even = true;
  for (const at::Tensor& input : inputs[0]) {
    check_dense(c, input, "input");
    check_same_type(c, input, output, "input");
    splits.push_back(input.numel());
    even = even && splits.back() == splits[0];
  }
  const auto mine = static_cast<std::size_t>(rank_);
  check_numel(c, output, splits[mine], "output");
  Reduction reduction = check_reduction(c, output, opts.reduceOp);
  return submit(c, inputs[0], outputs,
                [output, list = inputs[0], splits, even, mine, reduction = std::move(reduction)](
                    Carrier& carrier, const Deadline& deadline) {
                  Description gate;
                  gate.collective = Collective::kReduceScatter;
                  gate.dtype = dtype_of(output.scalar_type());
                  gate.reduce_op = reduction.op;
                  gate.count = static_cast<std::uint64_t>(
                      std::accumulate(splits.begin(), splits.end(), std::int64_t{0}));
                  gate.output_count = even ? static_cast<std::uint64_t>(splits[0]) : 0;
                  carrier.gate(gate, deadline);
                  if (!even) check_splits(carrier, splits, deadline);
                  PlainDispatch guard;
                  at::Tensor flat = scratch(static_cast<std::int64_t>(gate.count), output);
                  std::int64_t begin = 0;
                  std::int64_t at_mine = 0;
                  for (std::size_t r = 0; r < list.size(); ++r) {
                    if (r == mine) at_mine = begin;
                    flat.narrow(0, begin, splits[r]).view(list[r].sizes()).copy_(list[r]);
                    begin += splits[r];
                  }
                  reduce_scatter_one(carrier, output, flat, reduction, at_mine, deadline);
                });
}

FcclBackend::WorkPtr FcclBackend::reduce_scatter_all(const Call& c, Tensors& outputs, Tensors& inputs,
                                                     const ::c10d::ReduceOp& op) {
  if (inputs.empty()) refuse(c, Fault::kValue, "no tensors, expected at least one");
  check_length(c, outputs.size(), inputs.size(), "output tensors");
  std::vector<Reduction> reductions;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_dense(c, inputs[i], "input");
    check_dense(c, outputs[i], "output");
    check_written(c, outputs[i], "output");
    check_same_type(c, outputs[i], inputs[i], "output");
    check_numel(c, inputs[i], outputs[i].numel() * size_, "input");
    reductions.push_back(check_reduction(c, inputs[i], op));
  }
  return submit(
      c, inputs, outputs,
      [outputs, inputs, reductions = std::move(reductions)](Carrier& carrier, const Deadline& deadline) {
        Description gate;
        gate.collective = Collective::kReduceScatter;
        gate.dtype = dtype_of(inputs[0].scalar_type());
        gate.reduce_op = reductions[0].op;
        gate.tensors = static_cast<std::uint32_t>(inputs.size());
        for (const at::Tensor& input : inputs) gate.count += static_cast<std::uint64_t>(input.numel());
        for (const at::Tensor& output : outputs) {
          gate.output_count += static_cast<std::uint64_t>(output.numel());
        }
        carrier.gate(gate, deadline);
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          reduce_scatter_one(carrier, outputs[i], inputs[i], reductions[i],
                             outputs[i].numel() * carrier.rank(), deadline);
        }
      });
}

FcclBackend::WorkPtr FcclBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const ::c10d::ReduceScatterOptions& opts) {
  const Call c = call(OpType::_REDUCE_SCATTER_BASE, Collective::kReduceScatter, "fccl:_reduce_scatter_base",
                      opts.asyncOp, opts.timeout);
  if (input.is_cuda()) return cuda(c, input)._reduce_scatter_base(output, input, opts);
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_all(c, outputs, inputs, opts.reduceOp);
}

FcclBackend::WorkPtr FcclBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const ::c10d::ReduceScatterOptions& opts) {
  // torch 2.12 has a name of its own for this one; 2.11 does not.
  const Call c = call(OpType::COALESCED, Collective::kReduceScatter, "fccl:reduce_scatter_tensor_coalesced",
                      opts.asyncOp, opts.timeout);
  if (!inputs.empty() && inputs[0].is_cuda()) {
    return cuda(c, inputs[0]).reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  return reduce_scatter_all(c, outputs, inputs, opts.reduceOp);
}

}  // namespace fccl::c10d_backend
