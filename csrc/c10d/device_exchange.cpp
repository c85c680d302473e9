#include "c10d/device_exchange.h"

#include <cstring>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "c10d/gpu_engine.h"
#include "c10d/group_exchanges.h"
#include "c10d/hook_mean.h"
#include "c10d/tensors.h"

namespace fccl::hooks {
namespace {

std::byte* bytes_at(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

// By way of pinned memory, so that the host does not wait; torch keeps that until the copy is done.
at::Tensor copy_to(c10::Device device, const void* data, std::size_t bytes) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  const at::Tensor host = at::empty({static_cast<std::int64_t>(bytes)}, options.pinned_memory(true));
  if (bytes != 0) std::memcpy(host.mutable_data_ptr(), data, bytes);
  return host.to(options.device(device), /*non_blocking=*/true);
}

at::Tensor number_on(c10::Device device, float value) {
  return copy_to(device, &value, sizeof(value)).view(at::kFloat);
}

// Whether kernels read and write gradients of this type themselves.
bool has_kernels(at::ScalarType type, codec::BlockFormat format) {
  if (type == at::kFloat) return true;
  return codec::size_of_code(format).bytes == 1 && (type == at::kHalf || type == at::kBFloat16);
}

bool same(const Description& a, const Description& b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

// For comparing: where there is a backend for it, without a trip to the device.
c10::Device device_to_compare_on(const ProcessGroupPtr& group, c10::Device device) {
  return cpu_backend(group) ? c10::Device(at::kCPU) : device;
}

}  // namespace

bool codes_on_gpus() { return c10d_backend::built_with_kernels(); }

DeviceExchange::Device::Device(c10::Device device)
    : side(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
      pool(device),
      runtime(c10d_backend::make_gpu_runtime(device)),
      sm_count(runtime->facts().sm_count) {}

DeviceExchange::Device& DeviceExchange::device_of(c10::Device device) {
  const std::lock_guard lock(mutex_);
  auto& found = devices_[device.index()];
  if (!found) found = std::make_unique<Device>(device);
  return *found;
}

// By the first parameter, as indices of buckets are those of one model, and DDP cuts buckets anew.
std::shared_ptr<DeviceExchange::Known> DeviceExchange::known(const GradBucket& bucket) {
  const std::vector<at::Tensor> parameters = bucket.getParameters();
  TORCH_CHECK(!parameters.empty(), "the bucket has no parameters");
  const at::Tensor& first = parameters[0];
  const std::lock_guard lock(mutex_);
  const auto found = buckets_.find(first.unsafeGetTensorImpl());
  if (found != buckets_.end() && !found->second->parameter.expired()) return found->second;
  std::erase_if(buckets_, [](const auto& item) { return item.second->parameter.expired(); });
  const auto made = std::make_shared<Known>(
      Known{c10::weak_intrusive_ptr<c10::TensorImpl>(first.getIntrusivePtr()), {}, {}, {}, {}, {}});
  buckets_.insert_or_assign(first.unsafeGetTensorImpl(), made);
  return made;
}

void DeviceExchange::agree(const ExchangeContext& context, c10::Device device, Known& known,
                           const Description& call) {
  if (known.agreed && same(*known.agreed, call)) return;
  known.agreed.reset();  // after an error the ranks compare anew
  OverGroup over{*context.group};
  compare(over, device_to_compare_on(context.group, device), {call, context.has_data()});
  known.agreed = call;
}

FuturePtr DeviceExchange::start(const ExchangeContext& context, const GradBucket& bucket,
                                const PrepareBucket& prepare) {
  const at::Tensor& buffer = bucket.getBuffer();
  TORCH_CHECK_NOT_IMPLEMENTED(buffer.is_cuda() && codes_on_gpus(), "the bucket is on ", buffer.device(),
                              ", and this build of fccl has no kernels to compress it there: build fccl "
                              "where nvcc and a torch for CUDA are, or use fccl.hooks.AllReduce()");
  TORCH_CHECK(buffer.is_contiguous(), "the bucket's buffer has gaps");
  const std::shared_ptr<Known> known = this->known(bucket);
  Device& device = device_of(buffer.device());
  c10::Event filled(buffer.device().type());
  filled.record(c10::impl::VirtualGuardImpl(buffer.device().type()).getStream(buffer.device()));
  filled.block(device.side);
  const c10::StreamGuard guard(device.side);
  CodedBucket coded;
  try {
    coded = prepare();
  } catch (...) {
    // The peers compare if this rank was to.
    if (!known->agreed)
      agree(context, buffer.device(), *known,
            Description::rejected("failed on this rank: " + current_error()));
    throw;
  }
  agree(context, buffer.device(), *known, coded.call);
  exchange(context, device, *known, buffer, coded);
  buffer.record_stream(device.side);  // in case nobody waits for the Future
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(),
                                                         std::vector<c10::Device>{buffer.device()});
  future->markCompleted(buffer);  // for the host: whoever takes the value waits on the device
  return future;
}

void DeviceExchange::exchange(const ExchangeContext& context, Device& device, Known& known,
                              const at::Tensor& buffer, const CodedBucket& bucket) {
  OverGroup over{*context.group};
  const int rank = over.rank();
  at::Tensor values = buffer;
  if (!has_kernels(buffer.scalar_type(), bucket.format)) {
    if (!known.values.defined() || known.values.numel() != buffer.numel())
      known.values = at::empty({buffer.numel()}, buffer.options().dtype(at::kFloat));
    values = known.values.copy_(buffer);
  }
  const cuda::BucketPasses::Coding coding{c10d_backend::dtype_of(values.scalar_type()), bucket.format,
                                          bucket.block};
  const cuda::BucketPasses passes(coding, over.size(), bucket.ranges, values.mutable_data_ptr());
  if (!known.passes || !(*known.passes == passes)) {
    const auto tables = passes.tables();
    known.tables = copy_to(buffer.device(), tables.data(), tables.size_bytes());
    known.divisor = number_on(buffer.device(), static_cast<float>(over.size()));
    // Made or replaced on the user's streams, and used on this one.
    for (const at::Tensor& remainder : bucket.keeps) remainder.record_stream(device.side);
    known.passes.emplace(passes);
  }
  at::Tensor divisor = known.divisor;
  if (context.divides_by_active_ranks()) {
    divisor = number_on(buffer.device(), context.has_data() ? 1.0f : 0.0f);
    over.sum(divisor);
  }
  const cuda::BucketPasses::Place place{*device.runtime, device.sm_count,
                                        reinterpret_cast<const cuda::Range*>(known.tables.const_data_ptr()),
                                        device.side.native_handle()};
  WireMemory wire = device.pool.take(passes.wire_bytes(), false);
  passes.encode(place, bytes_at(wire.sent));
  over.all_to_all(wire.sent, wire.received);
  const auto shard = static_cast<std::int64_t>(passes.layout().shard_bytes());
  const at::Tensor mean = wire.sent.narrow(0, rank * shard, shard);
  passes.average(place, rank, bytes_at(wire.received), divisor.const_data_ptr<float>(), bytes_at(mean));
  over.all_gather(mean, wire.received);
  passes.decode(place, bytes_at(wire.received));
  if (!values.is_same(buffer)) buffer.copy_(values);
  device.pool.give_back(std::move(wire));
}

}  // namespace fccl::hooks
