// The collectives that the engine carries itself.
#include <cstdint>
#include <utility>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "c10d/backend.h"

namespace fccl::c10d_backend {

void gate_tensors(Carrier& carrier, Collective collective, const std::vector<at::Tensor>& tensors,
                  ReduceOp op, const Deadline& deadline) {
  if (tensors.size() == 1) return;
  Description call = Description::of(collective, DType::kBytes, 0, -1, op);
  call.tensors = static_cast<std::uint32_t>(tensors.size());
  for (const at::Tensor& tensor : tensors) call.count += static_cast<std::uint64_t>(tensor.numel());
  carrier.gate(call, deadline);
}

namespace {

using ::c10d::OpType;

void all_reduce_one(Carrier& carrier, const at::Tensor& tensor, const Reduction& reduction,
                    const Deadline& deadline) {
  const at::Tensor buffer = reduction.premultiply ? premultiplied(tensor, reduction) : readable(tensor);
  void* data = buffer.mutable_data_ptr();
  carrier.all_reduce(data, data, static_cast<std::size_t>(buffer.numel()) * reduction.per_element,
                     reduction.dtype, reduction.op, deadline);
  put_back(buffer, tensor);
}

void all_gather_one(Carrier& carrier, const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                    bool uneven, const Deadline& deadline) {
  const auto mine = static_cast<std::size_t>(carrier.rank());
  at::Tensor from = readable(input);
  std::vector<at::Tensor> results;
  std::vector<void*> places;
  std::vector<std::size_t> counts;
  results.reserve(outputs.size());
  for (std::size_t r = 0; r < outputs.size(); ++r) {
    results.push_back(writable(outputs[r]));
    places.push_back(results[r].mutable_data_ptr());
    counts.push_back(static_cast<std::size_t>(results[r].numel()));
    // The input may be this rank's output exactly (FSDP gathers so), but peers' data must not be
    // written over it before it has been read.
    const bool exact = r == mine && places[r] == from.const_data_ptr();
    if (!exact && overlaps(from, results[r])) {
      PlainDispatch guard;
      from = from.clone();
    }
  }
  carrier.all_gather(from.const_data_ptr(), places, counts, dtype_of(input.scalar_type()), uneven, deadline);
  for (std::size_t r = 0; r < outputs.size(); ++r) put_back(results[r], outputs[r]);
}

// The output of the single-tensor form: the inputs of all ranks one after the other.
void all_gather_into(Carrier& carrier, const at::Tensor& output, const at::Tensor& input,
                     const Deadline& deadline) {
  const auto mine = static_cast<std::size_t>(carrier.rank());
  at::Tensor from = readable(input);
  const at::Tensor result = writable(output);
  const auto count = static_cast<std::size_t>(input.numel());
  const std::size_t width = byte_count(from);
  auto* base = static_cast<char*>(result.mutable_data_ptr());
  const auto size = static_cast<std::size_t>(carrier.size());
  std::vector<void*> places(size);
  for (std::size_t r = 0; r < size; ++r) places[r] = base + r * width;
  const std::vector<std::size_t> counts(size, count);
  if (places[mine] != from.const_data_ptr() && overlaps(from, result)) {
    PlainDispatch guard;
    from = from.clone();
  }
  carrier.all_gather(from.const_data_ptr(), places, counts, dtype_of(input.scalar_type()), false, deadline);
  put_back(result, output);
}

}  // namespace

FcclBackend::WorkPtr FcclBackend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  const Call c =
      call(OpType::ALLREDUCE, Collective::kAllReduce, "fccl:all_reduce", opts.asyncOp, opts.timeout);
  const at::Tensor& tensor = only(c, tensors, "input");
  if (tensor.is_cuda()) {
    if (auto work = by_kernel(c, tensor, tensor, opts.reduceOp)) return work;
    return on_cuda(c, tensor, [&](::c10d::Backend& inner) { return inner.allreduce(tensors, opts); });
  }
  if (tensor.defined() && tensor.is_sparse()) return sparse_all_reduce(c, tensors, opts.reduceOp);
  check_dense(c, tensor, "input");
  check_written(c, tensor, "input");
  Reduction reduction = check_reduction(c, tensor, opts.reduceOp);
  return submit(c, tensors, tensors,
                [tensor, reduction = std::move(reduction)](Carrier& carrier, const Deadline& deadline) {
                  all_reduce_one(carrier, tensor, reduction, deadline);
                });
}

FcclBackend::WorkPtr FcclBackend::allreduce_coalesced(Tensors& tensors,
                                                      const ::c10d::AllreduceCoalescedOptions& opts) {
  const Call c = call(OpType::ALLREDUCE_COALESCED, Collective::kAllReduce, "fccl:all_reduce_coalesced",
                      opts.asyncOp, opts.timeout);
  if (tensors.empty()) refuse(c, Fault::kValue, "no tensors, expected at least one");
  if (tensors[0].is_cuda())
    return on_cuda(c, tensors[0],
                   [&](::c10d::Backend& inner) { return inner.allreduce_coalesced(tensors, opts); });
  std::vector<Reduction> reductions;
  for (const at::Tensor& tensor : tensors) {
    check_dense(c, tensor, "input");
    check_written(c, tensor, "input");
    reductions.push_back(check_reduction(c, tensor, opts.reduceOp));
  }
  return submit(c, tensors, tensors,
                [tensors, reductions = std::move(reductions)](Carrier& carrier, const Deadline& deadline) {
                  gate_tensors(carrier, Collective::kAllReduce, tensors, reductions[0].op, deadline);
                  for (std::size_t i = 0; i < tensors.size(); ++i) {
                    all_reduce_one(carrier, tensors[i], reductions[i], deadline);
                  }
                });
}

FcclBackend::WorkPtr FcclBackend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  const Call c =
      call(OpType::BROADCAST, Collective::kBroadcast, "fccl:broadcast", opts.asyncOp, opts.timeout);
  const at::Tensor& tensor = only(c, tensors, "input");
  if (tensor.is_cuda()) {
    if (auto work = by_kernel(c, tensor, tensor, ::c10d::ReduceOp::SUM, opts.rootRank)) return work;
    return on_cuda(c, tensor, [&](::c10d::Backend& inner) { return inner.broadcast(tensors, opts); });
  }
  check_dense(c, tensor, "input");
  check_root(c, opts.rootRank);
  const int root = static_cast<int>(opts.rootRank);
  if (root != rank_) check_written(c, tensor, "input");
  return submit(c, tensors, tensors, [tensor, root](Carrier& carrier, const Deadline& deadline) {
    const bool source = carrier.rank() == root;
    const at::Tensor buffer = source ? readable(tensor) : writable(tensor);
    carrier.broadcast(buffer.mutable_data_ptr(), static_cast<std::size_t>(buffer.numel()),
                      dtype_of(buffer.scalar_type()), root, deadline);
    if (!source) put_back(buffer, tensor);
  });
}

FcclBackend::WorkPtr FcclBackend::gather_all(const Call& c, const TensorLists& outputs, const Tensors& inputs,
                                             Tensors results, bool uneven) {
  // outputs[i] holds the tensors, by rank, that input i is gathered into.
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_dense(c, inputs[i], "input");
    check_length(c, outputs[i].size(), static_cast<std::size_t>(size_), "output tensors for one input");
    for (const at::Tensor& output : outputs[i]) {
      check_dense(c, output, "output");
      check_written(c, output, "output");
      check_same_type(c, output, inputs[i], "output");
    }
    check_numel(c, outputs[i][static_cast<std::size_t>(rank_)], inputs[i].numel(), "rank's own output");
  }
  return submit(c, inputs, std::move(results),
                [outputs, inputs, uneven](Carrier& carrier, const Deadline& deadline) {
                  gate_tensors(carrier, Collective::kAllGather, inputs, ReduceOp::kSum, deadline);
                  for (std::size_t i = 0; i < inputs.size(); ++i) {
                    all_gather_one(carrier, outputs[i], inputs[i], uneven, deadline);
                  }
                });
}

FcclBackend::WorkPtr FcclBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                            const ::c10d::AllgatherOptions& opts) {
  const Call c =
      call(OpType::ALLGATHER, Collective::kAllGather, "fccl:all_gather", opts.asyncOp, opts.timeout);
  const at::Tensor& input = only(c, inputs, "input");
  check_length(c, outputs.size(), 1, "lists of output tensors");
  if (input.is_cuda())
    return on_cuda(c, input, [&](::c10d::Backend& inner) { return inner.allgather(outputs, inputs, opts); });
  return gather_all(c, outputs, inputs, outputs[0], true);
}

FcclBackend::WorkPtr FcclBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const ::c10d::AllgatherOptions& opts) {
  const Call c = call(OpType::_ALLGATHER_BASE, Collective::kAllGather, "fccl:all_gather_into_tensor",
                      opts.asyncOp, opts.timeout);
  if (input.is_cuda()) {
    if (auto work = by_kernel(c, input, output)) return work;
    return on_cuda(c, input,
                   [&](::c10d::Backend& inner) { return inner._allgather_base(output, input, opts); });
  }
  check_dense(c, input, "input");
  check_dense(c, output, "output");
  check_written(c, output, "output");
  check_same_type(c, output, input, "output");
  check_numel(c, output, input.numel() * size_, "output");
  return submit(c, {input}, {output}, [output, input](Carrier& carrier, const Deadline& deadline) {
    all_gather_into(carrier, output, input, deadline);
  });
}

FcclBackend::WorkPtr FcclBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                      const ::c10d::AllgatherOptions& opts) {
  const Call c = call(OpType::ALLGATHER_COALESCED, Collective::kAllGather, "fccl:all_gather_coalesced",
                      opts.asyncOp, opts.timeout);
  if (inputs.empty()) refuse(c, Fault::kValue, "no tensors, expected at least one");
  if (inputs[0].is_cuda())
    return on_cuda(c, inputs[0],
                   [&](::c10d::Backend& inner) { return inner.allgather_coalesced(outputs, inputs, opts); });
  // Comes as one list per rank; turned into one list per input.
  check_length(c, outputs.size(), static_cast<std::size_t>(size_), "lists of output tensors (one per rank)");
  TensorLists by_input(inputs.size());
  Tensors results;
  for (const Tensors& of_rank : outputs) {
    check_length(c, of_rank.size(), inputs.size(), "output tensors in a rank's list");
    for (std::size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(of_rank[i]);
    results.insert(results.end(), of_rank.begin(), of_rank.end());
  }
  return gather_all(c, by_input, inputs, std::move(results), true);
}

FcclBackend::WorkPtr FcclBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const ::c10d::AllgatherOptions& opts) {
  const Call c = call(OpType::COALESCED, Collective::kAllGather, "fccl:all_gather_into_tensor_coalesced",
                      opts.asyncOp, opts.timeout);
  if (inputs.empty()) refuse(c, Fault::kValue, "no tensors, expected at least one");
  if (inputs[0].is_cuda())
    return on_cuda(c, inputs[0], [&](::c10d::Backend& inner) {
      return inner.allgather_into_tensor_coalesced(outputs, inputs, opts);
    });
  check_length(c, outputs.size(), inputs.size(), "output tensors");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_dense(c, inputs[i], "input");
    check_dense(c, outputs[i], "output");
    check_written(c, outputs[i], "output");
    check_same_type(c, outputs[i], inputs[i], "output");
    check_numel(c, outputs[i], inputs[i].numel() * size_, "output");
  }
  return submit(c, inputs, outputs, [outputs, inputs](Carrier& carrier, const Deadline& deadline) {
    gate_tensors(carrier, Collective::kAllGather, inputs, ReduceOp::kSum, deadline);
    for (std::size_t i = 0; i < inputs.size(); ++i) all_gather_into(carrier, outputs[i], inputs[i], deadline);
  });
}

FcclBackend::WorkPtr FcclBackend::exchange_bucket(const at::Tensor& bucket, Exchanges exchanges) {
  const Call c = call(OpType::ALLREDUCE, Collective::kCompressedAllReduce, "fccl:compressed_all_reduce", true,
                      ::c10d::kUnsetTimeout);
  return submit(c, {bucket}, {bucket}, std::move(exchanges));
}

FcclBackend::WorkPtr FcclBackend::barrier(const ::c10d::BarrierOptions& opts) {
  const Call c = call(OpType::BARRIER, Collective::kBarrier, "fccl:barrier", opts.asyncOp, opts.timeout);
  const bool names_cuda = (opts.device.has_value() && opts.device->is_cuda()) || !opts.device_ids.empty();
  if (names_cuda && cuda_factory_) {
    if (carrier_->mode() != Carrier::Mode::kEngine && !cuda_by_gloo_)
      return on_cuda(c, {}, [&](::c10d::Backend& inner) { return inner.barrier(opts); });
    // NCCL's is a collective whose end the host waits for. Waiting for the stream and then for the peers is
    // as good, and needs no NCCL.
    const c10::impl::VirtualGuardImpl cuda_guard(c10::kCUDA);
    c10::Device device = cuda_guard.getDevice();
    if (opts.device.has_value() && opts.device->is_cuda() && opts.device->has_index()) {
      device = *opts.device;
    } else if (!opts.device_ids.empty()) {
      device = {c10::kCUDA, static_cast<c10::DeviceIndex>(opts.device_ids[0])};
    }
    const GilRelease unlocked;
    cuda_guard.synchronizeStream(cuda_guard.getStream(device));
  }
  return submit(c, {}, {}, [](Carrier& carrier, const Deadline& deadline) { carrier.barrier(deadline); });
}

}  // namespace fccl::c10d_backend
