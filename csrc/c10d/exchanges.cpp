// The collectives that move pieces between ranks: gather, scatter, all_to_all.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "c10d/backend.h"

namespace fccl::c10d_backend {
namespace {

using ::c10d::OpType;

std::size_t numel_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

// Plain tensors that take what the engine writes, for `outputs`: themselves where they are plain and no part
// of them is read meanwhile. `from[mine]`, if there is one, may be `outputs[mine]` exactly.
std::vector<at::Tensor> targets(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& from,
                                std::size_t mine) {
  std::vector<at::Tensor> results;
  results.reserve(outputs.size());
  for (std::size_t r = 0; r < outputs.size(); ++r) {
    at::Tensor result = writable(outputs[r]);
    for (std::size_t i = 0; i < from.size(); ++i) {
      const bool exact =
          r == mine && (from.size() == 1 || i == mine) && result.const_data_ptr() == from[i].const_data_ptr();
      if (exact || !overlaps(result, from[i])) continue;
      result = scratch(outputs[r].numel(), outputs[r]).view(outputs[r].sizes());
      break;
    }
    results.push_back(std::move(result));
  }
  return results;
}

std::vector<at::Tensor> all_readable(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> plain;
  plain.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) plain.push_back(readable(tensor));
  return plain;
}

std::vector<const void*> places_to_read(const std::vector<at::Tensor>& tensors) {
  std::vector<const void*> places;
  for (const at::Tensor& tensor : tensors) places.push_back(tensor.const_data_ptr());
  return places;
}

std::vector<void*> places_to_write(const std::vector<at::Tensor>& tensors) {
  std::vector<void*> places;
  for (const at::Tensor& tensor : tensors) places.push_back(tensor.mutable_data_ptr());
  return places;
}

void put_all_back(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& outputs) {
  for (std::size_t r = 0; r < results.size(); ++r) put_back(results[r], outputs[r]);
}

}  // namespace

FcclBackend::WorkPtr FcclBackend::gather(TensorLists& outputs, Tensors& inputs,
                                         const ::c10d::GatherOptions& opts) {
  const Call c = call(OpType::GATHER, Collective::kGather, "fccl:gather", opts.asyncOp, opts.timeout);
  const at::Tensor& input = only(c, inputs, "input");
  if (input.is_cuda())
    return on_cuda(c, input, [&](::c10d::Backend& inner) { return inner.gather(outputs, inputs, opts); });
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
    const at::Tensor from = readable(input);
    const std::vector<at::Tensor> results = targets(list, {from}, static_cast<std::size_t>(carrier.rank()));
    carrier.gather(from.const_data_ptr(), places_to_write(results), numel_of(from),
                   dtype_of(from.scalar_type()), root, deadline);
    put_all_back(results, list);
  });
}

#ifdef C10D_BACKEND_HAS_HOOKS
FcclBackend::WorkPtr FcclBackend::gather_single(at::Tensor& output, at::Tensor& input,
                                                const ::c10d::GatherOptions& opts) {
  const Call c = call(OpType::GATHER, Collective::kGather, "fccl:gather_single", opts.asyncOp, opts.timeout);
  if (input.is_cuda())
    return on_cuda(c, input,
                   [&](::c10d::Backend& inner) { return inner.gather_single(output, input, opts); });
  check_dense(c, input, "input");
  check_root(c, opts.rootRank);
  const int root = static_cast<int>(opts.rootRank);
  Tensors results;
  if (root == rank_) {
    check_dense(c, output, "output");
    check_written(c, output, "output");
    check_same_type(c, output, input, "output");
    check_numel(c, output, input.numel() * size_, "output");
    results.push_back(output);
  }
  return submit(c, {input}, results, [results, input, root](Carrier& carrier, const Deadline& deadline) {
    at::Tensor from = readable(input);
    at::Tensor whole;
    std::vector<void*> places;
    if (!results.empty()) {
      whole = writable(results[0]);
      for (int rank = 0; rank < carrier.size(); ++rank) {
        places.push_back(static_cast<char*>(whole.mutable_data_ptr()) +
                         byte_count(from) * static_cast<std::size_t>(rank));
      }
      const bool exact = places[static_cast<std::size_t>(root)] == from.const_data_ptr();
      if (!exact && overlaps(from, whole)) {
        PlainDispatch guard;
        from = from.clone();
      }
    }
    carrier.gather(from.const_data_ptr(), places, numel_of(from), dtype_of(from.scalar_type()), root,
                   deadline);
    if (!results.empty()) put_back(whole, results[0]);
  });
}
#endif

FcclBackend::WorkPtr FcclBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                          const ::c10d::ScatterOptions& opts) {
  const Call c = call(OpType::SCATTER, Collective::kScatter, "fccl:scatter", opts.asyncOp, opts.timeout);
  const at::Tensor& output = only(c, outputs, "output");
  if (output.is_cuda())
    return on_cuda(c, output, [&](::c10d::Backend& inner) { return inner.scatter(outputs, inputs, opts); });
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
    const std::vector<at::Tensor> sources = all_readable(list);
    // The one output is this rank's piece.
    const auto mine = static_cast<std::size_t>(carrier.rank());
    at::Tensor result = writable(output);
    for (std::size_t r = 0; r < sources.size(); ++r) {
      const bool exact = r == mine && result.const_data_ptr() == sources[r].const_data_ptr();
      if (!exact && overlaps(result, sources[r]))
        result = scratch(output.numel(), output).view(output.sizes());
    }
    carrier.scatter(places_to_read(sources), result.mutable_data_ptr(), numel_of(result),
                    dtype_of(result.scalar_type()), root, deadline);
    put_back(result, output);
  });
}

// outputs[r] receives what rank r sends here; inputs[r] goes to rank r. The profiler sees `named`, the caller
// gets `results`.
FcclBackend::WorkPtr FcclBackend::exchange(const Call& c, const Tensors& named, Tensors results,
                                           Tensors outputs, Tensors inputs) {
  return submit(c, named, std::move(results), [outputs, inputs](Carrier& carrier, const Deadline& deadline) {
    const std::vector<at::Tensor> from = all_readable(inputs);
    const std::vector<at::Tensor> to = targets(outputs, from, static_cast<std::size_t>(carrier.rank()));
    std::vector<std::size_t> sends;
    std::vector<std::size_t> expects;
    for (const at::Tensor& input : from) sends.push_back(numel_of(input));
    for (const at::Tensor& output : to) expects.push_back(numel_of(output));
    carrier.all_to_all({places_to_read(from), sends, places_to_write(to), expects},
                       dtype_of(from[0].scalar_type()), deadline);
    put_all_back(to, outputs);
  });
}

FcclBackend::WorkPtr FcclBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                std::vector<std::int64_t>& output_splits,
                                                std::vector<std::int64_t>& input_splits,
                                                const ::c10d::AllToAllOptions& opts) {
  const Call c = call(OpType::ALLTOALL_BASE, Collective::kAllToAll, "fccl:all_to_all_single", opts.asyncOp,
                      opts.timeout);
  if (input.is_cuda())
    return on_cuda(c, input, [&](::c10d::Backend& inner) {
      return inner.alltoall_base(output, input, output_splits, input_splits, opts);
    });
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
  return exchange(c, {input}, {output}, std::move(outputs), std::move(inputs));
}

FcclBackend::WorkPtr FcclBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                           const ::c10d::AllToAllOptions& opts) {
  const Call c = call(OpType::ALLTOALL, Collective::kAllToAll, "fccl:all_to_all", opts.asyncOp, opts.timeout);
  check_length(c, inputs.size(), static_cast<std::size_t>(size_), "input tensors");
  check_length(c, outputs.size(), static_cast<std::size_t>(size_), "output tensors");
  if (inputs[0].is_cuda())
    return on_cuda(c, inputs[0],
                   [&](::c10d::Backend& inner) { return inner.alltoall(outputs, inputs, opts); });
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    check_dense(c, inputs[r], "input");
    check_dense(c, outputs[r], "output");
    check_written(c, outputs[r], "output");
    check_same_type(c, inputs[r], inputs[0], "input");
    check_same_type(c, outputs[r], inputs[0], "output");
  }
  return exchange(c, inputs, outputs, outputs, inputs);
}

}  // namespace fccl::c10d_backend
