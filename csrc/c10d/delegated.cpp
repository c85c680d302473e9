// What the inner backend (Gloo) does: calls that only move bytes, and sparse sums.
//
// Each passes the mismatch gate first, and Gloo sees contiguous bytes only: its own dtype list and
// its faults with strided tensors and unequal sizes do not reach the user.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "c10d/backend.h"
#include "cpu/siphash.h"

namespace fccl::c10d_backend {
namespace {

using ::c10d::OpType;

Description describe_call(Collective collective, const at::Tensor& tensor, int root) {
  return Description::of(collective, dtype_of(tensor.scalar_type()),
                         static_cast<std::uint64_t>(tensor.numel()), root);
}

std::string pair_text(std::int64_t sent, std::size_t from, std::int64_t expected, std::size_t to) {
  return "rank " + std::to_string(from) + " sends " + std::to_string(sent) + " elements to rank " +
         std::to_string(to) + ", which expects " + std::to_string(expected);
}

// Every rank learns what every rank sends and expects, so all of them see a misfit alike. Returns
// the number of elements exchanged in the whole group.
std::int64_t check_exchange(Carrier& carrier, const std::vector<std::int64_t>& sends,
                            const std::vector<std::int64_t>& expects, const Deadline& deadline) {
  const std::size_t size = sends.size();
  std::vector<std::int64_t> row(sends);
  row.insert(row.end(), expects.begin(), expects.end());
  std::vector<std::int64_t> table(2 * size * size);
  std::vector<void*> places(size);
  for (std::size_t r = 0; r < size; ++r) places[r] = table.data() + 2 * size * r;
  const std::vector<std::size_t> counts(size, 2 * size);
  carrier.all_gather(row.data(), places, counts, DType::kInt64, false, deadline);
  std::int64_t total = 0;
  for (std::size_t from = 0; from < size; ++from) {
    for (std::size_t to = 0; to < size; ++to) {
      const std::int64_t sent = table[2 * size * from + to];
      const std::int64_t expected = table[2 * size * to + size + from];
      if (sent != expected) {
        throw Error(ErrorKind::kMismatch, "fccl all_to_all on rank " + std::to_string(carrier.rank()) + ": " +
                                              pair_text(sent, from, expected, to) +
                                              ". No data was exchanged and the group stays usable.");
      }
      total += sent;
    }
  }
  return total;
}

}  // namespace

FcclBackend::WorkPtr FcclBackend::sparse_all_reduce(const Call& sparse_call, Tensors& tensors,
                                                    const ::c10d::ReduceOp& op) {
  Call c = sparse_call;
  c.collective = Collective::kSparseAllReduce;
  const at::Tensor& tensor = only(c, tensors, "input");
  if (!tensor.device().is_cpu() || tensor.layout() != at::kSparse) {
    refuse(c, Fault::kValue, "the tensor is " + describe(tensor) + ", expected a sparse (COO) CPU tensor");
  }
  const Reduction reduction = check_reduction(c, tensor, op);
  if ((reduction.op != ReduceOp::kSum && reduction.op != ReduceOp::kAvg) || reduction.premultiply) {
    refuse(c, Fault::kType,
           std::string("reduce op ") + name_of(reduction.op) + " on a sparse tensor, expected sum or avg");
  }
  return submit(c, tensors, tensors, [tensor, op = reduction.op](Carrier& carrier, const Deadline& deadline) {
    Description call = describe_call(Collective::kSparseAllReduce, tensor, -1);
    call.reduce_op = op;
    // Ranks may have other elements, but of tensors of one shape, of which as many dimensions are sparse.
    std::vector<std::int64_t> shape = tensor.sizes().vec();
    shape.push_back(tensor.sparse_dim());
    call.flags = Description::kUneven;
    call.output_count = cpu::fingerprint(shape);
    carrier.gate(call, deadline);
    if (carrier.size() == 1) return;
    std::vector<at::Tensor> inputs{tensor};
    ::c10d::AllreduceOptions options;
    options.timeout = inner_timeout(deadline);
    carrier.wait_for(*carrier.inner()->allreduce(inputs, options), deadline);
    if (op == ReduceOp::kAvg) {
      PlainDispatch guard;
      at::Tensor values = inputs[0]._values();
      if (at::isIntegralType(values.scalar_type(), true)) {
        values.div_(carrier.size(), "trunc");
      } else {
        values.div_(carrier.size());
      }
    }
  });
}

FcclBackend::WorkPtr FcclBackend::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  const Call c = call(OpType::_ALLREDUCE_SPARSE, Collective::kSparseAllReduce, "fccl:all_reduce_sparse",
                      opts.asyncOp, opts.timeout);
  const at::Tensor& tensor = only(c, tensors, "input");
  if (tensor.is_cuda()) return cuda(c, tensor).allreduce_sparse(tensors, opts);
  return sparse_all_reduce(c, tensors, opts.reduceOp);
}

FcclBackend::WorkPtr FcclBackend::gather(TensorLists& outputs, Tensors& inputs,
                                         const ::c10d::GatherOptions& opts) {
  const Call c = call(OpType::GATHER, Collective::kGather, "fccl:gather", opts.asyncOp, opts.timeout);
  const at::Tensor& input = only(c, inputs, "input");
  if (input.is_cuda()) return cuda(c, input).gather(outputs, inputs, opts);
  check_dense(c, input, "input");
  check_root(c, opts.rootRank);
  const int root = static_cast<int>(opts.rootRank);
  Tensors list;
  if (root == rank_) {
    check_length(c, outputs.size(), 1, "lists of output tensors on the root");
    list = outputs[0];
    check_length(c, list.size(), static_cast<std::size_t>(size_), "output tensors on the root");
    for (const at::Tensor& output : list) {
      check_dense(c, output, "output");
      check_written(c, output, "output");
      check_same_type(c, output, input, "output");
      check_numel(c, output, input.numel(), "output");
    }
  } else {
    check_length(c, outputs.size(), 0, "lists of output tensors on a rank that is not the root");
  }
  return submit(c, inputs, list, [list, input, root](Carrier& carrier, const Deadline& deadline) {
    if (carrier.size() == 1) return put_back(input.is_same(list[0]) ? input : input.clone(), list[0]);
    const at::Tensor from = readable(input);
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> bytes;
    for (const at::Tensor& output : list) {
      results.push_back(writable(output));
      // Gloo may write the outputs in any order while it reads the input.
      if (overlaps(results.back(), from))
        results.back() = scratch(output.numel(), output).view(output.sizes());
      bytes.push_back(bytes_of(results.back()));
    }
    carrier.gate(describe_call(Collective::kGather, input, root), deadline);
    if (input.numel() == 0) return;
    std::vector<std::vector<at::Tensor>> out;
    if (!bytes.empty()) out.push_back(bytes);
    std::vector<at::Tensor> in{bytes_of(from)};
    ::c10d::GatherOptions options;
    options.rootRank = root;
    options.timeout = inner_timeout(deadline);
    carrier.wait_for(*carrier.inner()->gather(out, in, options), deadline);
    for (std::size_t r = 0; r < results.size(); ++r) put_back(results[r], list[r]);
  });
}

FcclBackend::WorkPtr FcclBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                          const ::c10d::ScatterOptions& opts) {
  const Call c = call(OpType::SCATTER, Collective::kScatter, "fccl:scatter", opts.asyncOp, opts.timeout);
  const at::Tensor& output = only(c, outputs, "output");
  if (output.is_cuda()) return cuda(c, output).scatter(outputs, inputs, opts);
  check_dense(c, output, "output");
  check_written(c, output, "output");
  check_root(c, opts.rootRank);
  const int root = static_cast<int>(opts.rootRank);
  Tensors list;
  if (root == rank_) {
    check_length(c, inputs.size(), 1, "lists of input tensors on the root");
    list = inputs[0];
    check_length(c, list.size(), static_cast<std::size_t>(size_), "input tensors on the root");
    for (const at::Tensor& input : list) {
      check_dense(c, input, "input");
      check_same_type(c, input, output, "input");
      check_numel(c, input, output.numel(), "input");
    }
  } else {
    check_length(c, inputs.size(), 0, "lists of input tensors on a rank that is not the root");
  }
  return submit(c, list, outputs, [list, output, root](Carrier& carrier, const Deadline& deadline) {
    if (carrier.size() == 1) return put_back(list[0], output);
    at::Tensor result = writable(output);
    std::vector<at::Tensor> sources;
    std::vector<at::Tensor> bytes;
    for (const at::Tensor& input : list) {
      sources.push_back(readable(input));
      if (overlaps(sources.back(), result)) result = scratch(output.numel(), output).view(output.sizes());
      bytes.push_back(bytes_of(sources.back()));
    }
    carrier.gate(describe_call(Collective::kScatter, output, root), deadline);
    if (output.numel() == 0) return;
    std::vector<std::vector<at::Tensor>> in;
    if (!bytes.empty()) in.push_back(bytes);
    std::vector<at::Tensor> out{bytes_of(result)};
    ::c10d::ScatterOptions options;
    options.rootRank = root;
    options.timeout = inner_timeout(deadline);
    carrier.wait_for(*carrier.inner()->scatter(out, in, options), deadline);
    put_back(result, output);
  });
}

// outputs[r] receives what rank r sends here; inputs[r] goes to rank r.
FcclBackend::WorkPtr FcclBackend::exchange(const Call& c, Tensors results, Tensors outputs, Tensors inputs) {
  return submit(c, inputs, std::move(results), [outputs, inputs](Carrier& carrier, const Deadline& deadline) {
    // Private copies before the gate: a rank without memory for them must fail as a refused call does.
    const auto width = static_cast<std::int64_t>(inputs[0].element_size());
    std::vector<std::int64_t> sends;
    std::vector<std::int64_t> expects;
    for (const at::Tensor& input : inputs) sends.push_back(input.numel());
    for (const at::Tensor& output : outputs) expects.push_back(output.numel());
    const auto flat_of = [&](const std::vector<std::int64_t>& sizes) {
      return scratch(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}), inputs[0]);
    };
    const at::Tensor from = flat_of(sends);
    std::int64_t begin = 0;
    {
      PlainDispatch guard;
      for (std::size_t r = 0; r < inputs.size(); ++r) {
        from.narrow(0, begin, sends[r]).view(inputs[r].sizes()).copy_(inputs[r]);
        begin += sends[r];
      }
    }
    const at::Tensor to = carrier.size() > 1 ? flat_of(expects) : from;
    Description gate = describe_call(Collective::kAllToAll, inputs[0], -1);
    gate.count = 0;
    for (const at::Tensor& input : inputs) gate.count += static_cast<std::uint64_t>(input.numel());
    gate.flags = Description::kUneven;
    carrier.gate(gate, deadline);
    const std::int64_t total = check_exchange(carrier, sends, expects, deadline);
    if (total == 0) return;
    PlainDispatch guard;
    if (carrier.size() > 1) {
      at::Tensor to_bytes = bytes_of(to);
      at::Tensor from_bytes = bytes_of(from);
      for (auto& count : sends) count *= width;
      for (auto& count : expects) count *= width;
      ::c10d::AllToAllOptions options;
      options.timeout = inner_timeout(deadline);
      carrier.wait_for(*carrier.inner()->alltoall_base(to_bytes, from_bytes, expects, sends, options),
                       deadline);
    }
    begin = 0;
    for (const at::Tensor& output : outputs) {
      at::Tensor target = output;
      target.copy_(to.narrow(0, begin, output.numel()).view(output.sizes()));
      begin += output.numel();
    }
  });
}

FcclBackend::WorkPtr FcclBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                std::vector<std::int64_t>& output_splits,
                                                std::vector<std::int64_t>& input_splits,
                                                const ::c10d::AllToAllOptions& opts) {
  const Call c =
      call(OpType::ALLTOALL_BASE, Collective::kAllToAll, "fccl:all_to_all_base", opts.asyncOp, opts.timeout);
  if (input.is_cuda()) return cuda(c, input).alltoall_base(output, input, output_splits, input_splits, opts);
  const auto pieces = [&](const at::Tensor& tensor, const std::vector<std::int64_t>& splits,
                          const char* what) {
    check_dense(c, tensor, what);
    if (tensor.dim() == 0)
      refuse(c, Fault::kValue, std::string("the ") + what + " tensor has no dimension to split");
    const std::int64_t rows = tensor.size(0);
    if (splits.empty()) {
      if (rows % size_ != 0) {
        refuse(c, Fault::kValue,
               std::string("the ") + what + " tensor has " + std::to_string(rows) +
                   " rows, expected a multiple of the world size " + std::to_string(size_));
      }
      return tensor.split(std::max<std::int64_t>(rows / size_, 1), 0);
    }
    check_length(c, splits.size(), static_cast<std::size_t>(size_), "split sizes");
    if (std::accumulate(splits.begin(), splits.end(), std::int64_t{0}) != rows ||
        std::any_of(splits.begin(), splits.end(), [](std::int64_t split) { return split < 0; })) {
      refuse(c, Fault::kValue,
             std::string("the ") + what + " split sizes do not add up to the tensor's " +
                 std::to_string(rows) + " rows");
    }
    return tensor.split_with_sizes(splits, 0);
  };
  PlainDispatch guard;
  std::vector<std::int64_t> even_in(input_splits);
  std::vector<std::int64_t> even_out(output_splits);
  // Zero rows split evenly: one empty piece per rank.
  if (even_in.empty() && input.dim() != 0 && input.size(0) == 0)
    even_in.assign(static_cast<std::size_t>(size_), 0);
  if (even_out.empty() && output.dim() != 0 && output.size(0) == 0)
    even_out.assign(static_cast<std::size_t>(size_), 0);
  Tensors inputs = pieces(input, even_in, "input");
  Tensors outputs = pieces(output, even_out, "output");
  check_written(c, output, "output");
  check_same_type(c, output, input, "output");
  return exchange(c, {output}, std::move(outputs), std::move(inputs));
}

FcclBackend::WorkPtr FcclBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                           const ::c10d::AllToAllOptions& opts) {
  const Call c = call(OpType::ALLTOALL, Collective::kAllToAll, "fccl:all_to_all", opts.asyncOp, opts.timeout);
  check_length(c, inputs.size(), static_cast<std::size_t>(size_), "input tensors");
  check_length(c, outputs.size(), static_cast<std::size_t>(size_), "output tensors");
  if (inputs[0].is_cuda()) return cuda(c, inputs[0]).alltoall(outputs, inputs, opts);
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    check_dense(c, inputs[r], "input");
    check_dense(c, outputs[r], "output");
    check_written(c, outputs[r], "output");
    check_same_type(c, inputs[r], inputs[0], "input");
    check_same_type(c, outputs[r], inputs[0], "output");
  }
  return exchange(c, outputs, outputs, inputs);
}

// No gate: its purpose is to name the ranks that do not come.
void FcclBackend::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) {
  Call c = call(OpType::BARRIER, Collective::kBarrier, "fccl:monitored_barrier", false, opts.timeout);
  submit(c, {}, {}, [wait_all_ranks](Carrier& carrier, const Deadline& deadline) {
    if (carrier.size() == 1) return;
    ::c10d::BarrierOptions options;
    options.timeout = inner_timeout(deadline);
    carrier.inner()->monitoredBarrier(options, wait_all_ranks);
  });
}

}  // namespace fccl::c10d_backend
