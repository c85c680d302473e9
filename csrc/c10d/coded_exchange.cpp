#include "c10d/coded_exchange.h"

#include <optional>
#include <utility>

#include <ATen/ATen.h>

#include "c10d/backend.h"
#include "c10d/group_exchanges.h"
#include "c10d/hook_mean.h"
#include "cpu/bucket_coder.h"

namespace fccl::hooks {
namespace {

using c10d_backend::Carrier;
using c10d_backend::FcclBackend;

std::byte* bytes_at(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

cpu::BucketCoder coder_of(const CodedBucket& bucket, int world_size) {
  return {bucket.format, bucket.block, world_size, bucket.ranges};
}

at::Tensor shard_of(const at::Tensor& wire, const cpu::BucketCoder& coder, int rank) {
  const auto bytes = static_cast<std::int64_t>(coder.layout().shard_bytes());
  return wire.narrow(0, rank * bytes, bytes);
}

// The two exchanges of equal parts and what lies between them. `Exchanges` has all_to_all(input, output) and
// all_gather(input, output).
template <class Exchanges>
void exchange_codes(const cpu::BucketCoder& coder, const WireMemory& wire, const at::Tensor& values, int rank,
                    int divisor, Exchanges&& over) {
  auto* const floats = values.mutable_data_ptr<float>();
  coder.encode(floats, bytes_at(wire.sent));
  over.all_to_all(wire.sent, wire.received);
  const at::Tensor mean = shard_of(wire.sent, coder, rank);
  coder.average(rank, bytes_at(wire.received), divisor, bytes_at(mean));
  over.all_gather(mean, wire.received);
  coder.decode(bytes_at(wire.received), floats);
}

int checked_divisor(std::int64_t ranks, int world_size) {
  TORCH_CHECK(ranks >= 1 && ranks <= world_size, "fccl: ", ranks, " of ", world_size, " ranks have data");
  return static_cast<int>(ranks);
}

// Plain float32, which the coder reads and writes: the buffer itself if it is that.
at::Tensor values_of(const at::Tensor& buffer) { return buffer.to(at::kFloat).contiguous(); }
void put_values(const at::Tensor& values, const at::Tensor& buffer) {
  if (!values.is_same(buffer)) buffer.copy_(values);
}

// ---- over fccl ----

struct OverCarrier {
  Carrier& carrier;
  const Deadline& deadline;
  void all_to_all(const at::Tensor& input, const at::Tensor& output) {
    carrier.all_to_all_equal(input, output, deadline);
  }
  void all_gather(const at::Tensor& input, const at::Tensor& output) {
    carrier.all_gather_equal(input, output, deadline);
  }
};

FuturePtr over_fccl(FcclBackend& backend, const ExchangeContext& context, const at::Tensor& buffer,
                    PrepareBucket prepare, std::shared_ptr<WireMemoryPool> pool) {
  const bool shared = backend.engine() == "shared-memory" && backend.why_no_zero_copy().empty();
  const bool counts = context.divides_by_active_ranks();
  const auto work = backend.exchange_bucket(
      buffer, [buffer, prepare = std::move(prepare), pool = std::move(pool), shared, counts,
               has_data = std::int64_t{context.has_data()}](Carrier& carrier, const Deadline& deadline) {
        const at::NoGradGuard no_grad;
        // What needs memory comes before the gate: a call that fails there is one that this rank rejects.
        const CodedBucket bucket = prepare();
        const cpu::BucketCoder coder = coder_of(bucket, carrier.size());
        WireMemory wire = pool->take(coder.wire_bytes(), shared);
        const at::Tensor values = values_of(buffer);
        carrier.gate(bucket.call, deadline);
        std::int64_t ranks = carrier.size();
        if (counts) carrier.all_reduce(&has_data, &ranks, 1, DType::kInt64, ReduceOp::kSum, deadline);
        exchange_codes(coder, wire, values, carrier.rank(), checked_divisor(ranks, carrier.size()),
                       OverCarrier{carrier, deadline});
        put_values(values, buffer);
        pool->give_back(std::move(wire));
      });
  return work->getFuture();
}

// ---- over any process group ----

FuturePtr over_group(const ExchangeContext& context, const at::Tensor& buffer, const PrepareBucket& prepare,
                     WireMemoryPool& pool) {
  OverGroup over{*context.group};
  const int rank = over.rank();
  const int size = over.size();
  std::optional<CodedBucket> bucket;
  std::optional<cpu::BucketCoder> coder;
  WireMemory wire;
  at::Tensor values;
  try {
    bucket = prepare();
    coder = coder_of(*bucket, size);
    wire = pool.take(coder->wire_bytes(), false);
    values = values_of(buffer);
  } catch (...) {
    // Which tells the peers, and raises on all ranks.
    compare(over, at::kCPU, {Description::rejected("failed on this rank: " + current_error()), 0});
    throw;
  }
  const std::int64_t with_data = compare(over, at::kCPU, {bucket->call, context.has_data()});
  const std::int64_t ranks = context.divides_by_active_ranks() ? with_data : size;
  exchange_codes(*coder, wire, values, rank, checked_divisor(ranks, size), over);
  put_values(values, buffer);
  pool.give_back(std::move(wire));
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  future->markCompleted(buffer);
  return future;
}

}  // namespace

FuturePtr CodedExchange::start(const ExchangeContext& context, const GradBucket& bucket,
                               PrepareBucket prepare) {
  const at::Tensor& buffer = bucket.getBuffer();
  if (!buffer.is_cpu()) return on_devices_.start(context, bucket, prepare);
  const auto backend = cpu_backend(context.group);
  if (auto* fccl = dynamic_cast<FcclBackend*>(backend.get()))
    return over_fccl(*fccl, context, buffer, std::move(prepare), pool_);
  return over_group(context, buffer, prepare, *pool_);
}

}  // namespace fccl::hooks
