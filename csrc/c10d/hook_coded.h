// The hooks that send gradients as codes: bfloat16, float16 and the block formats of one byte.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

#include "c10d/coded_exchange.h"
#include "c10d/hook_base.h"
#include "c10d/remainders.h"
#include "codec/block.h"

namespace fccl::hooks {

// float32 and float64 buckets travel as bfloat16: half (a quarter of) the bytes. All others (16-bit,
// complex and sparse ones) are exchanged as AllReduce does.
//
// Where ranks share memory, the bucket is narrowed inside its own memory, averaged by one all_reduce of the
// engine, and widened there: nothing is allocated, so no time goes into page faults, and a bucket in shared
// memory stays in it. Elsewhere, and where the mean is over the ranks that have data, it is coded. The bits
// are the same.
class BF16Compress final : public GradientHook {
 public:
  const char* name() const noexcept override { return "fccl.hooks.BF16Compress"; }

 protected:
  bool compresses(at::ScalarType type) const override { return type == at::kFloat || type == at::kDouble; }
  FuturePtr exchange(const ExchangeContext& context, GradBucket& bucket) override;

 private:
  CodedExchange exchange_;
};

// float32 and float64 buckets travel as float16, in blocks of 256 elements that are scaled by a power of two
// each, so that neither 1e6 nor 1e-8 is lost. All others are exchanged as AllReduce does.
class FP16Compress final : public GradientHook {
 public:
  const char* name() const noexcept override { return "fccl.hooks.FP16Compress"; }

 protected:
  bool compresses(at::ScalarType type) const override { return type == at::kFloat || type == at::kDouble; }
  FuturePtr exchange(const ExchangeContext& context, GradBucket& bucket) override;

 private:
  CodedExchange exchange_;
};

// All real floating-point buckets travel as one byte per element and one scale per block; what is lost is
// added to the next gradient (error feedback). Exempt parameters travel as float32.
class BlockQuantize final : public GradientHook {
 public:
  struct Config {
    codec::BlockFormat format = codec::BlockFormat::kInt8;
    std::uint32_t block = 256;
    bool error_feedback = true;
    // Parameters with fewer dimensions are exempt: 2 for norms and biases, 0 for none.
    std::int64_t exempt_below_dimensions = 2;
  };

  explicit BlockQuantize(const Config& config) : config_(config) {}
  const char* name() const noexcept override { return "fccl.hooks.BlockQuantize"; }

  // Instead of the rule on dimensions: these are, no others. Before the first bucket.
  void set_exempt(const std::vector<at::Tensor>& parameters);
  Remainders& remainders() noexcept { return *remainders_; }

 protected:
  bool compresses(at::ScalarType type) const override {
    return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
  }
  FuturePtr exchange(const ExchangeContext& context, GradBucket& bucket) override;

 private:
  bool is_exempt(const at::Tensor& parameter) const;

  const Config config_;
  bool exempt_by_name_ = false;
  std::unordered_set<const c10::TensorImpl*> exempt_;
  // Shared with exchanges under way.
  const std::shared_ptr<Remainders> remainders_ = std::make_shared<Remainders>();
  CodedExchange exchange_;
};

}  // namespace fccl::hooks
