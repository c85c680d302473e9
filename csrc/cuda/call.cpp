#include "cuda/call.h"

#include "cuda/workspace.h"

namespace fccl::cuda {
namespace {

// From the lowest bit on.
constexpr int kCollectiveBits = 4;
constexpr int kDTypeBits = 5;
constexpr int kOpBits = 4;
constexpr int kRootBits = 4;
constexpr int kCountAt = kCollectiveBits + kDTypeBits + kOpBits + kRootBits;
static_assert(kCountAt + 47 == 64);
static_assert(kCollectiveCount <= 1 << kCollectiveBits && kDTypeCount <= 1 << kDTypeBits);
static_assert(kReduceOpCount <= 1 << kOpBits && kMaxRanks <= 1 << kRootBits);

std::uint64_t take(std::uint64_t& word, int bits) {
  const std::uint64_t value = word & ((std::uint64_t{1} << bits) - 1);
  word >>= bits;
  return value;
}

}  // namespace

std::uint64_t GpuCall::pack() const noexcept {
  std::uint64_t word = count % kCountLimit;
  word = word << kRootBits | static_cast<std::uint64_t>(root & ((1 << kRootBits) - 1));
  word = word << kOpBits | static_cast<std::uint64_t>(op);
  word = word << kDTypeBits | static_cast<std::uint64_t>(dtype);
  return word << kCollectiveBits | static_cast<std::uint64_t>(collective);
}

GpuCall GpuCall::unpack(std::uint64_t word) noexcept {
  GpuCall call;
  call.collective = static_cast<Collective>(take(word, kCollectiveBits));
  call.dtype = static_cast<DType>(take(word, kDTypeBits));
  call.op = static_cast<ReduceOp>(take(word, kOpBits));
  call.root = static_cast<std::int32_t>(take(word, kRootBits));
  call.count = word;
  return call;
}

std::string GpuCall::to_string() const {
  if (collective == Collective::kRejected) return "a refused call";
  const bool has_root = collective == Collective::kBroadcast;
  Description description = Description::of(collective, dtype, count, has_root ? root : -1, op);
  description.validate();  // enumerators that there are
  return description.to_string();
}

}  // namespace fccl::cuda
