#include "c10d/coded_exchange.h"

#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include <ATen/ATen.h>

#include "c10d/arena_tensors.h"
#include "c10d/backend.h"
#include "c10d/hook_mean.h"

namespace fccl::hooks {
namespace {

using c10d_backend::Carrier;
using c10d_backend::FcclBackend;

std::byte* bytes_at(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

at::Tensor shard_of(const at::Tensor& wire, const CodedBucket& bucket, int rank) {
  const auto bytes = static_cast<std::int64_t>(bucket.coder.layout().shard_bytes());
  return wire.narrow(0, rank * bytes, bytes);
}

// The two exchanges of equal parts and what lies between them. `Exchanges` has all_to_all(input, output) and
// all_gather(input, output).
template <class Exchanges>
void exchange_codes(const CodedBucket& bucket, const WireMemory& wire, const at::Tensor& values, int rank,
                    int divisor, Exchanges&& over) {
  auto* const floats = values.mutable_data_ptr<float>();
  bucket.coder.encode(floats, bytes_at(wire.sent));
  over.all_to_all(wire.sent, wire.received);
  const at::Tensor mean = shard_of(wire.sent, bucket, rank);
  bucket.coder.average(rank, bytes_at(wire.received), divisor, bytes_at(mean));
  over.all_gather(mean, wire.received);
  bucket.coder.decode(bytes_at(wire.received), floats);
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
        WireMemory wire = pool->take(bucket.coder.wire_bytes(), shared);
        const at::Tensor values = values_of(buffer);
        carrier.gate(bucket.call, deadline);
        std::int64_t ranks = carrier.size();
        if (counts) carrier.all_reduce(&has_data, &ranks, 1, DType::kInt64, ReduceOp::kSum, deadline);
        exchange_codes(bucket, wire, values, carrier.rank(), checked_divisor(ranks, carrier.size()),
                       OverCarrier{carrier, deadline});
        put_values(values, buffer);
        pool->give_back(std::move(wire));
      });
  return work->getFuture();
}

// ---- over any process group ----

// torch 2.13 renamed it, and warns of the old name.
template <class Group>
auto start_all_to_all(Group& group, at::Tensor& output, at::Tensor& input) {
  std::vector<std::int64_t> even;
  if constexpr (requires { group.all_to_all_single(output, input, even, even); }) {
    return group.all_to_all_single(output, input, even, even);
  } else {
    return group.alltoall_base(output, input, even, even);
  }
}

struct OverGroup {
  ProcessGroup& group;

  void all_to_all(at::Tensor input, at::Tensor output) { wait(start_all_to_all(group, output, input)); }
  // The form with lists is the one that groups written in Python can have.
  void all_gather(const at::Tensor& input, const at::Tensor& output) {
    std::vector<at::Tensor> inputs{input};
    std::vector<std::vector<at::Tensor>> outputs{output.tensor_split(group.getSize())};
    wait(group.allgather(outputs, inputs));
  }

 private:
  static void wait(const c10::intrusive_ptr<::c10d::Work>& work) {
    TORCH_CHECK(work, "the process group's backend returned no Work, which a compressing hook needs");
    work->wait();
    // Not every kind of Work raises what it ended with, nor has a Future: c10d's base class throws.
    FuturePtr future;
    try {
      future = work->getFuture();
    } catch (const c10::Error&) {
      return;
    }
    if (future) future->waitAndThrow();
  }
};

// What the ranks compare, as fccl does by itself.
struct Announcement {
  Description call;
  std::int64_t has_data = 0;
};

// Returns the number of ranks that have data.
std::int64_t compare(OverGroup& over, const Announcement& own, int rank, int size) {
  const std::int64_t bytes = sizeof(Announcement);
  const at::Tensor mine = at::empty({bytes}, at::kByte);
  const at::Tensor all = at::empty({size * bytes}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), &own, sizeof(own));
  over.all_gather(mine, all);
  std::vector<Announcement> announcements(static_cast<std::size_t>(size));
  std::memcpy(announcements.data(), all.const_data_ptr(), announcements.size() * sizeof(Announcement));
  std::vector<Description> calls;
  std::int64_t with_data = 0;
  for (Announcement& each : announcements) {
    each.call.validate();
    calls.push_back(each.call);
    if (each.has_data != 0) ++with_data;
  }
  const std::string verdict = check_compatible(calls);
  TORCH_CHECK_WITH(DistBackendError, verdict.empty(), "fccl ", own.call.to_string(), " on rank ", rank, ": ",
                   verdict);
  return with_data;
}

// What went wrong on this rank, while it is handled.
std::string current_error() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

FuturePtr over_group(const ExchangeContext& context, const at::Tensor& buffer, const PrepareBucket& prepare,
                     WireMemoryPool& pool) {
  ProcessGroup& group = *context.group;
  const int rank = group.getRank();
  const int size = group.getSize();
  OverGroup over{group};
  std::optional<CodedBucket> bucket;
  WireMemory wire;
  at::Tensor values;
  try {
    bucket = prepare();
    wire = pool.take(bucket->coder.wire_bytes(), false);
    values = values_of(buffer);
  } catch (...) {
    // Which tells the peers, and raises on all ranks.
    compare(over, {Description::rejected("failed on this rank: " + current_error()), 0}, rank, size);
    throw;
  }
  const std::int64_t with_data = compare(over, {bucket->call, context.has_data()}, rank, size);
  const std::int64_t ranks = context.divides_by_active_ranks() ? with_data : size;
  exchange_codes(*bucket, wire, values, rank, checked_divisor(ranks, size), over);
  put_values(values, buffer);
  pool.give_back(std::move(wire));
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  future->markCompleted(buffer);
  return future;
}

}  // namespace

WireMemory WireMemoryPool::take(std::uint64_t bytes, bool shared) {
  const auto size = static_cast<std::int64_t>(bytes);
  WireMemory memory;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      memory = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!memory.sent.defined() || memory.sent.storage().nbytes() < bytes) {
    memory = {};  // before more is asked for
    memory.sent =
        shared ? c10d_backend::arena_empty({size}, at::kByte, "fccl.hooks") : at::empty({size}, at::kByte);
    memory.received = at::empty({size}, at::kByte);
  }
  memory.sent = memory.sent.as_strided({size}, {1});
  memory.received = memory.received.as_strided({size}, {1});
  return memory;
}

void WireMemoryPool::give_back(WireMemory memory) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(memory));
}

FuturePtr exchange_coded(const ExchangeContext& context, const at::Tensor& buffer, PrepareBucket prepare,
                         const std::shared_ptr<WireMemoryPool>& pool) {
  const auto backend = cpu_backend(context.group);
  if (auto* fccl = dynamic_cast<FcclBackend*>(backend.get()))
    return over_fccl(*fccl, context, buffer, std::move(prepare), pool);
  return over_group(context, buffer, prepare, *pool);
}

}  // namespace fccl::hooks
