// reduce and reduce_scatter.
#include <utility>
#include <vector>

#include "c10d/backend.h"

namespace fccl::c10d_backend {
namespace {

using ::c10d::OpType;

at::Tensor prepared(const at::Tensor& input, const Reduction& reduction) {
  return reduction.premultiply ? premultiplied(input, reduction) : readable(input);
}

std::size_t numbers_in(const at::Tensor& tensor, const Reduction& reduction) {
  return static_cast<std::size_t>(tensor.numel()) * reduction.per_element;
}

// `pieces[r]` is what this rank gives to rank r's output. The peers may read all of them while this rank
// writes its own output, which may be its own piece exactly.
void reduce_scatter_one(Carrier& carrier, const at::Tensor& output, const std::vector<at::Tensor>& pieces,
                        const Reduction& reduction, const Deadline& deadline) {
  const auto mine = static_cast<std::size_t>(carrier.rank());
  std::vector<const void*> inputs;
  std::vector<std::size_t> counts;
  at::Tensor result = writable(output);
  for (std::size_t r = 0; r < pieces.size(); ++r) {
    inputs.push_back(pieces[r].const_data_ptr());
    counts.push_back(numbers_in(pieces[r], reduction));
    const bool exact = r == mine && result.const_data_ptr() == inputs[r];
    if (!exact && overlaps(result, pieces[r])) result = scratch(output.numel(), output).view(output.sizes());
  }
  carrier.reduce_scatter(inputs, counts, result.mutable_data_ptr(), reduction.dtype, reduction.op, deadline);
  put_back(result, output);
}

}  // namespace

FcclBackend::WorkPtr FcclBackend::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  const Call c = call(OpType::REDUCE, Collective::kReduce, "fccl:reduce", opts.asyncOp, opts.timeout);
  const at::Tensor& tensor = only(c, tensors, "input");
  if (tensor.is_cuda())
    return on_cuda(c, tensor, [&](::c10d::Backend& inner) { return inner.reduce(tensors, opts); });
  check_dense(c, tensor, "input");
  check_root(c, opts.rootRank);
  const int root = static_cast<int>(opts.rootRank);
  if (root == rank_) check_written(c, tensor, "input");
  Reduction reduction = check_reduction(c, tensor, opts.reduceOp);
  return submit(c, tensors, tensors,
                [tensor, root, reduction = std::move(reduction)](Carrier& carrier, const Deadline& deadline) {
                  const at::Tensor from = prepared(tensor, reduction);
                  const bool receives = carrier.rank() == root;
                  const at::Tensor to = receives ? writable(tensor) : from;
                  carrier.reduce(from.const_data_ptr(), receives ? to.mutable_data_ptr() : nullptr,
                                 numbers_in(tensor, reduction), reduction.dtype, reduction.op, root,
                                 deadline);
                  if (receives) put_back(to, tensor);
                });
}

FcclBackend::WorkPtr FcclBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                 const ::c10d::ReduceScatterOptions& opts) {
  const Call c = call(OpType::REDUCE_SCATTER, Collective::kReduceScatter, "fccl:reduce_scatter", opts.asyncOp,
                      opts.timeout);
  const at::Tensor& output = only(c, outputs, "output");
  check_length(c, inputs.size(), 1, "lists of input tensors");
  if (output.is_cuda())
    return on_cuda(c, output,
                   [&](::c10d::Backend& inner) { return inner.reduce_scatter(outputs, inputs, opts); });
  check_length(c, inputs[0].size(), static_cast<std::size_t>(size_), "input tensors");
  check_dense(c, output, "output");
  check_written(c, output, "output");
  for (const at::Tensor& input : inputs[0]) {
    check_dense(c, input, "input");
    check_same_type(c, input, output, "input");
  }
  check_numel(c, output, inputs[0][static_cast<std::size_t>(rank_)].numel(), "output");
  Reduction reduction = check_reduction(c, output, opts.reduceOp);
  return submit(c, inputs[0], outputs,
                [output, list = inputs[0], reduction = std::move(reduction)](Carrier& carrier,
                                                                             const Deadline& deadline) {
                  std::vector<at::Tensor> pieces;
                  for (const at::Tensor& input : list) pieces.push_back(prepared(input, reduction));
                  reduce_scatter_one(carrier, output, pieces, reduction, deadline);
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
        gate_tensors(carrier, Collective::kReduceScatter, inputs, reductions[0].op, deadline);
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          PlainDispatch guard;
          const at::Tensor flat = prepared(inputs[i], reductions[i]).reshape({-1});
          std::vector<at::Tensor> pieces;
          for (int rank = 0; rank < carrier.size(); ++rank) {
            pieces.push_back(flat.narrow(0, outputs[i].numel() * rank, outputs[i].numel()));
          }
          reduce_scatter_one(carrier, outputs[i], pieces, reductions[i], deadline);
        }
      });
}

FcclBackend::WorkPtr FcclBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const ::c10d::ReduceScatterOptions& opts) {
  const Call c = call(OpType::_REDUCE_SCATTER_BASE, Collective::kReduceScatter, "fccl:reduce_scatter_tensor",
                      opts.asyncOp, opts.timeout);
  if (input.is_cuda())
    return on_cuda(c, input,
                   [&](::c10d::Backend& inner) { return inner._reduce_scatter_base(output, input, opts); });
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
    return on_cuda(c, inputs[0], [&](::c10d::Backend& inner) {
      return inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts);
    });
  }
  return reduce_scatter_all(c, outputs, inputs, opts.reduceOp);
}

}  // namespace fccl::c10d_backend
