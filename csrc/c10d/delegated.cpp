// Sparse sums, which the inner backend (Gloo) does on shared-memory groups, too, and the monitored barrier.
#include <cstdint>
#include <utility>
#include <vector>

#include "c10d/backend.h"
#include "cpu/siphash.h"

namespace fccl::c10d_backend {
namespace {

using ::c10d::OpType;

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
    std::vector<at::Tensor> inputs{tensor};
    ::c10d::AllreduceOptions options;
    options.timeout = inner_timeout(deadline);
    carrier.wait_for(*carrier.inner().allreduce(inputs, options), deadline);
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

// Names the ranks that have not come, in the words that torch has for it.
void FcclBackend::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) {
  Call c = call(OpType::BARRIER, Collective::kBarrier, "fccl:monitored_barrier", false, opts.timeout);
  // No time at all is what it says here.
  if (opts.timeout == std::chrono::milliseconds::zero()) c.timeout = std::chrono::milliseconds(1);
  submit(c, {}, {}, [wait_all_ranks](Carrier& carrier, const Deadline& deadline) {
    if (carrier.mode() == Carrier::Mode::kInner) {
      ::c10d::BarrierOptions options;
      options.timeout = inner_timeout(deadline);
      carrier.inner().monitoredBarrier(options, wait_all_ranks);
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
