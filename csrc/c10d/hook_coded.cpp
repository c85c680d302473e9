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
constexpr std::uint32_t kBFloat16Block = 256;  // it has no scales: a unit of work

// One range per parameter, in the order in which DDP lays the gradients out.
std::vector<codec::BucketRange> ranges_of(const GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  std::vector<codec::BucketRange> ranges;
  std::uint64_t elements = 0;
  for (const at::Tensor& gradient : bucket.getGradients()) {
    codec::BucketRange range;
    range.begin = static_cast<std::uint64_t>(gradient.storage_offset() - buffer.storage_offset());
    range.length = static_cast<std::uint64_t>(gradient.numel());
    elements += range.length;
    ranges.push_back(range);
  }
  TORCH_CHECK(elements == static_cast<std::uint64_t>(buffer.numel()), "the bucket has ", buffer.numel(),
              " elements and its gradients have ", elements);
  const std::size_t parameters = bucket.getParameters().size();
  TORCH_CHECK(parameters == ranges.size(), "the bucket has ", parameters, " parameters and ", ranges.size(),
              " gradients");
  return ranges;
}

// How a bucket travels: what all ranks must agree on.
struct Coding {
  BlockFormat format;
  std::uint32_t block;
  std::string more;  // for people: "block=256, error_feedback"
  bool divides_by_active_ranks = false;
};

Description describe(const Coding& coding, const at::Tensor& buffer, std::size_t index,
                     const std::vector<codec::BucketRange>& ranges) {
  std::vector<std::uint64_t> coded = {static_cast<std::uint64_t>(coding.format), coding.block, index,
                                      coding.divides_by_active_ranks ? 1u : 0u};
  std::size_t exempt = 0;
  for (const codec::BucketRange& range : ranges) {
    const bool feedback = range.remainder != nullptr;
    coded.push_back(range.length * 4 + (range.exempt ? 2 : 0) + (feedback ? 1 : 0));
    if (range.exempt) ++exempt;
  }
  Description call =
      Description::of(Collective::kCompressedAllReduce, c10d_backend::dtype_of(buffer.scalar_type()),
                      static_cast<std::uint64_t>(buffer.numel()), -1, ReduceOp::kAvg);
  call.output_count = cpu::fingerprint(coded);
  std::string note = codec::name_of(coding.format) + coding.more + ", bucket " + std::to_string(index);
  if (exempt != 0)
    note += ", " + std::to_string(exempt) + " of " + std::to_string(ranges.size()) + " parameters exempt";
  if (coding.divides_by_active_ranks) note += ", divided by the ranks that have data";
  call.set_note(note);
  return call;
}

// `keeps`: what the ranges' remainders lie in.
CodedBucket coded_bucket(const Coding& coding, const at::Tensor& buffer, std::size_t index,
                         std::vector<codec::BucketRange> ranges, std::vector<at::Tensor> keeps = {}) {
  const Description call = describe(coding, buffer, index, ranges);
  return {coding.format, coding.block, std::move(ranges), call, std::move(keeps)};
}

}  // namespace

FuturePtr BF16Compress::exchange(const ExchangeContext& context, GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  const bool is_coded = buffer.is_cpu() ? !reduces_bfloat16_exactly(context) : codes_on_gpus();
  if (!is_coded) return bfloat16_mean(context, buffer);
  const Coding coding{BlockFormat::kBFloat16, kBFloat16Block, "", context.divides_by_active_ranks()};
  const auto prepare = [coding, buffer, index = bucket.getIndex()] {
    codec::BucketRange whole;
    whole.length = static_cast<std::uint64_t>(buffer.numel());
    return coded_bucket(coding, buffer, index, {whole});
  };
  return exchange_.start(context, bucket, prepare);
}

FuturePtr FP16Compress::exchange(const ExchangeContext& context, GradBucket& bucket) {
  const Coding coding{BlockFormat::kFloat16, kFloat16Block, "", context.divides_by_active_ranks()};
  const auto prepare = [coding, bucket] {
    return coded_bucket(coding, bucket.getBuffer(), bucket.getIndex(), ranges_of(bucket));
  };
  return exchange_.start(context, bucket, prepare);
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
  const std::string more =
      ", block=" + std::to_string(config_.block) + (config_.error_feedback ? ", error_feedback" : "");
  const Coding coding{config_.format, config_.block, more, context.divides_by_active_ranks()};
  std::vector<bool> exempt;
  for (const at::Tensor& parameter : bucket.getParameters()) exempt.push_back(is_exempt(parameter));
  const std::shared_ptr<Remainders> remainders = config_.error_feedback ? remainders_ : nullptr;
  const auto prepare = [coding, bucket, exempt = std::move(exempt), remainders] {
    std::vector<codec::BucketRange> ranges = ranges_of(bucket);
    const std::vector<at::Tensor> parameters = bucket.getParameters();
    std::vector<at::Tensor> keeps;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      ranges[i].exempt = exempt[i];
      if (exempt[i] || remainders == nullptr) continue;
      keeps.push_back(remainders->of(parameters[i]));
      ranges[i].remainder = keeps.back().mutable_data_ptr<float>();
    }
    return coded_bucket(coding, bucket.getBuffer(), bucket.getIndex(), std::move(ranges), std::move(keeps));
  };
  return exchange_.start(context, bucket, prepare);
}

}  // namespace fccl::hooks
