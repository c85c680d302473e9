#include "c10d/hook_coded.h"

#include <string>
#include <utility>

#include <ATen/ATen.h>

#include "c10d/hook_mean.h"
#include "c10d/tensors.h"
#include "cpu/siphash.h"

namespace fccl::hooks {
namespace {

using codec::BlockFormat;

// Enough for a warp of vectors, and little enough that a scale of four bytes does not count.
constexpr std::uint32_t kFloat16Block = 256;
constexpr std::uint32_t kBFloat16Block = 1024;  // it has no scales

const char* name_of(BlockFormat format) {
  switch (format) {
    case BlockFormat::kBFloat16: return "bfloat16";
    case BlockFormat::kFloat16: return "float16";
    case BlockFormat::kInt8: return "int8";
    case BlockFormat::kFloat8E4M3: return "fp8_e4m3";
    case BlockFormat::kFloat8E5M2: return "fp8_e5m2";
  }
  return "unknown";
}

// One range per parameter, in the order in which DDP lays the gradients out.
std::vector<cpu::BucketRange> ranges_of(const GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  std::vector<cpu::BucketRange> ranges;
  std::uint64_t elements = 0;
  for (const at::Tensor& gradient : bucket.getGradients()) {
    cpu::BucketRange range;
    range.begin = static_cast<std::uint64_t>(gradient.storage_offset() - buffer.storage_offset());
    range.length = static_cast<std::uint64_t>(gradient.numel());
    elements += range.length;
    ranges.push_back(range);
  }
  TORCH_CHECK(elements == static_cast<std::uint64_t>(buffer.numel()), "the bucket has ", buffer.numel(),
              " elements and its gradients have ", elements);
  return ranges;
}

Description describe(const at::Tensor& buffer, const std::vector<cpu::BucketRange>& ranges,
                     BlockFormat format, std::uint32_t block, const std::string& more = {}) {
  std::vector<std::uint64_t> coded = {static_cast<std::uint64_t>(format), block};
  std::size_t exempt = 0;
  for (const cpu::BucketRange& range : ranges) {
    const bool feedback = range.remainder != nullptr;
    coded.push_back(range.length * 4 + (range.exempt ? 2 : 0) + (feedback ? 1 : 0));
    if (range.exempt) ++exempt;
  }
  Description call =
      Description::of(Collective::kCompressedAllReduce, c10d_backend::dtype_of(buffer.scalar_type()),
                      static_cast<std::uint64_t>(buffer.numel()), -1, ReduceOp::kAvg);
  call.output_count = cpu::fingerprint(coded);
  call.set_note(std::string(name_of(format)) + more +
                (exempt == 0 ? std::string()
                             : ", " + std::to_string(exempt) + " of " + std::to_string(ranges.size()) +
                                   " parameters exempt"));
  return call;
}

void check_on_cpu(const char* hook, const at::Tensor& buffer) {
  TORCH_CHECK_NOT_IMPLEMENTED(buffer.is_cpu(), hook, " compresses CPU tensors, and this bucket is on ",
                              buffer.device(), "; use fccl.hooks.AllReduce() or fccl.hooks.BF16Compress()");
}

FuturePtr exchange_ranges(const ExchangeContext& context, const at::Tensor& buffer, BlockFormat format,
                          std::uint32_t block, std::vector<cpu::BucketRange> ranges,
                          std::vector<at::Tensor> keeps, const std::string& more,
                          const std::shared_ptr<WireMemoryPool>& pool) {
  const Description call = describe(buffer, ranges, format, block, more);
  cpu::BucketCoder coder(format, block, context.group->getSize(), std::move(ranges));
  return exchange_coded(context, {buffer, std::move(coder), call, std::move(keeps)}, pool);
}

}  // namespace

FuturePtr BF16Compress::exchange(const ExchangeContext& context, GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  if (!buffer.is_cpu() || reduces_bfloat16_exactly(context.group)) return bfloat16_mean(context, buffer);
  cpu::BucketRange whole;
  whole.length = static_cast<std::uint64_t>(buffer.numel());
  return exchange_ranges(context, buffer, BlockFormat::kBFloat16, kBFloat16Block, {whole}, {}, "", pool_);
}

FuturePtr FP16Compress::exchange(const ExchangeContext& context, GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  check_on_cpu(name(), buffer);
  return exchange_ranges(context, buffer, BlockFormat::kFloat16, kFloat16Block, ranges_of(bucket), {}, "",
                         pool_);
}

bool BlockQuantize::is_exempt(const at::Tensor& parameter) const {
  if (exempt_by_name_) return exempt_.contains(parameter.unsafeGetTensorImpl());
  return parameter.dim() < config_.exempt_below_dimensions;
}

void BlockQuantize::set_exempt(const std::vector<at::Tensor>& parameters) {
  exempt_by_name_ = true;
  exempt_.clear();
  for (const at::Tensor& parameter : parameters) exempt_.insert(parameter.unsafeGetTensorImpl());
}

FuturePtr BlockQuantize::exchange(const ExchangeContext& context, GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  check_on_cpu(name(), buffer);
  std::vector<cpu::BucketRange> ranges = ranges_of(bucket);
  const std::vector<at::Tensor> parameters = bucket.getParameters();
  TORCH_CHECK(parameters.size() == ranges.size(), "the bucket has ", parameters.size(), " parameters and ",
              ranges.size(), " gradients");
  std::vector<at::Tensor> keeps;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    ranges[i].exempt = is_exempt(parameters[i]);
    if (ranges[i].exempt || !config_.error_feedback) continue;
    keeps.push_back(remainders_.of(parameters[i]));
    ranges[i].remainder = keeps.back().mutable_data_ptr<float>();
  }
  const std::string more =
      ", block=" + std::to_string(config_.block) + (config_.error_feedback ? ", error_feedback" : "");
  return exchange_ranges(context, buffer, config_.format, config_.block, std::move(ranges), std::move(keeps),
                         more, pool_);
}

}  // namespace fccl::hooks
