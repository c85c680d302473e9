// Sparse sums and the monitored barrier.
#include <cstdint>
#include <utility>
#include <vector>

#include "c10d/backend.h"
#include "cpu/siphash.h"

namespace fccl::c10d_backend {
namespace {

using ::c10d::OpType;

void divide(at::Tensor values, int by) {
  if (at::isIntegralType(values.scalar_type(), true)) {
    values.div_(by, "trunc");
  } else {
    values.div_(by);
  }
}

void sum_over_gloo(Carrier& carrier, const at::Tensor& tensor, ReduceOp op, const Deadline& deadline) {
  std::vector<at::Tensor> tensors{tensor};
  ::c10d::AllreduceOptions options;
  options.timeout = inner_timeout(deadline);
  carrier.wait_for(*carrier.inner()->allreduce(tensors, options), deadline);
  PlainDispatch guard;
  if (op == ReduceOp::kAvg) divide(tensors[0]._values(), carrier.size());
}

// All ranks' rows, of which each rank has its own number, one rank's after the other's.
std::vector<at::Tensor> gather_rows(Carrier& carrier, const at::Tensor& own,
                                    const std::vector<std::int64_t>& numbers, const Deadline& deadline) {
  std::vector<at::Tensor> all;
  std::vector<void*> places;
  std::vector<std::size_t> counts;
  for (const std::int64_t number : numbers) {
    std::vector<std::int64_t> shape = own.sizes().vec();
    shape[0] = number;
    all.push_back(at::empty(shape, own.options()));
    places.push_back(all.back().mutable_data_ptr());
    counts.push_back(static_cast<std::size_t>(all.back().numel()));
  }
  carrier.all_gather(own.const_data_ptr(), places, counts, dtype_of(own.scalar_type()), true, deadline);
  return all;
}

// Each rank gathers what all have and adds it up in rank order; 16-bit floats in float32, rounded once.
void sum_on_engine(Carrier& carrier, const at::Tensor& tensor, ReduceOp op, const Deadline& deadline) {
  PlainDispatch guard;
  const at::Tensor own = tensor.coalesce();
  const at::ScalarType type = own.scalar_type();
  const bool narrow = type == at::kHalf || type == at::kBFloat16;
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(carrier.size()));
  const std::int64_t number = own._nnz();
  std::vector<void*> places;
  for (std::int64_t& each : numbers) places.push_back(&each);
  carrier.all_gather(&number, places, std::vector<std::size_t>(numbers.size(), 1), DType::kInt64, false,
                     deadline);
  const auto indices = gather_rows(carrier, own._indices().t().contiguous(), numbers, deadline);
  const auto values = gather_rows(carrier, own._values().contiguous(), numbers, deadline);
  at::Tensor total;
  for (std::size_t rank = 0; rank < numbers.size(); ++rank) {
    at::Tensor part = at::_sparse_coo_tensor_unsafe(
        indices[rank].t(), narrow ? values[rank].to(at::kFloat) : values[rank], own.sizes());
    part._coalesced_(true);
    total = rank == 0 ? part : total.add(part);
  }
  total = total.coalesce();
  if (op == ReduceOp::kAvg) divide(total._values(), carrier.size());
  tensor.copy_(narrow ? total.to(type) : total);
}

std::string who_failed(Carrier& carrier, const Deadline& deadline, bool all) {
  const std::string time = std::to_string(deadline.span().count()) + " ms";
  const std::vector<int> missing = carrier.group()->missing_ranks();
  if (carrier.rank() != 0 || missing.empty()) {
    return "Rank " + std::to_string(carrier.rank()) +
           " successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
           "rank "
           "0. Please check rank 0 logs for faulty rank. Within " +
           time + ": ";
  }
  if (!all || missing.size() == 1)
    return "Rank " + std::to_string(missing[0]) + " failed to pass monitoredBarrier in " + time + ". ";
  std::string ranks;
  for (const int rank : missing) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return "Ranks " + ranks + " failed to pass monitoredBarrier in " + time + ". ";
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
    Description call = Description::of(Collective::kSparseAllReduce, dtype_of(tensor.scalar_type()),
                                       static_cast<std::uint64_t>(tensor.numel()), -1, op);
    // Ranks may have other elements, but of tensors of one shape, of which as many dimensions are sparse.
    std::vector<std::int64_t> shape = tensor.sizes().vec();
    shape.push_back(tensor.sparse_dim());
    call.flags = Description::kUneven;
    call.output_count = cpu::fingerprint(shape);
    carrier.gate(call, deadline);
    if (carrier.size() == 1) return;
    if (carrier.mode() == Carrier::Mode::kInner) {
      sum_over_gloo(carrier, tensor, op, deadline);
    } else {
      sum_on_engine(carrier, tensor, op, deadline);
    }
  });
}

FcclBackend::WorkPtr FcclBackend::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  const Call c = call(OpType::_ALLREDUCE_SPARSE, Collective::kSparseAllReduce, "fccl:all_reduce_sparse",
                      opts.asyncOp, opts.timeout);
  const at::Tensor& tensor = only(c, tensors, "input");
  if (tensor.is_cuda())
    return on_cuda(c, tensor, [&](::c10d::Backend& inner) { return inner.allreduce_sparse(tensors, opts); });
  return sparse_all_reduce(c, tensors, opts.reduceOp);
}

// Names the ranks that have not come, in the words that torch has for it.
void FcclBackend::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) {
  Call c = call(OpType::BARRIER, Collective::kBarrier, "fccl:monitored_barrier", false, opts.timeout);
  // No time at all is what it says here.
  if (opts.timeout == std::chrono::milliseconds::zero()) c.timeout = std::chrono::milliseconds(1);
  submit(c, {}, {}, [wait_all_ranks](Carrier& carrier, const Deadline& deadline) {
    if (carrier.mode() == Carrier::Mode::kInner) {
      ::c10d::BarrierOptions options;
      options.timeout = inner_timeout(deadline);
      carrier.inner()->monitoredBarrier(options, wait_all_ranks);
      return;
    }
    try {
      carrier.barrier(deadline);
    } catch (const Error& error) {
      if (!error.is_sticky()) throw;
      std::string text = who_failed(carrier, deadline, wait_all_ranks);
      if (error.kind() == ErrorKind::kTimeout)
        text += "Rank " + std::to_string(carrier.rank()) + " timed out in monitoredBarrier. ";
      throw Error(error.kind(), text + error.what());
    }
  });
}

}  // namespace fccl::c10d_backend
