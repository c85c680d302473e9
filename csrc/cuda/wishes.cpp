#include "cuda/wishes.h"

#include <algorithm>
#include <vector>

namespace fccl::cuda {
namespace {

// From the lowest bit on; the top byte tells a word of ours from no word at all.
constexpr std::uint64_t kMark = std::uint64_t{0xFC} << 56;
constexpr std::uint64_t kInnerBits = 0x3;
constexpr std::uint64_t kHasKernels = 1 << 2;
constexpr std::uint64_t kWantsKernels = 1 << 3;
constexpr std::uint64_t kDeterministic = 1 << 4;
constexpr std::uint64_t kFloat32Accumulation = 1 << 5;
constexpr std::uint64_t kMayShareGpu = 1 << 6;

// "rank 1", "ranks 0 and 2", "ranks 0, 1 and 5".
template <class Which>
std::string ranks_with(std::span<const Wishes> all, Which which) {
  std::vector<std::size_t> ranks;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (which(all[rank])) ranks.push_back(rank);
  }
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i != 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

// Why a wish that only some ranks have does not hold; empty if all agree.
std::string split_over(std::span<const Wishes> all, bool Wishes::* wish, const std::string& name) {
  const auto has = [wish](const Wishes& each) { return each.*wish; };
  if (std::none_of(all.begin(), all.end(), has) || std::all_of(all.begin(), all.end(), has)) return {};
  return name + " is 1 on " + ranks_with(all, has) + " and not on " +
         ranks_with(all, [&](const Wishes& each) { return !has(each); });
}

}  // namespace

std::uint64_t Wishes::pack() const noexcept {
  std::uint64_t word = kMark | static_cast<std::uint64_t>(inner);
  if (has_kernels) word |= kHasKernels;
  if (wants_kernels) word |= kWantsKernels;
  if (deterministic) word |= kDeterministic;
  if (float32_accumulation) word |= kFloat32Accumulation;
  if (may_share_gpu) word |= kMayShareGpu;
  return word;
}

Wishes Wishes::unpack(std::uint64_t word) noexcept {
  Wishes wishes;
  if ((word & (std::uint64_t{0xFF} << 56)) != kMark) return wishes;
  const std::uint64_t inner = word & kInnerBits;
  if (inner <= static_cast<std::uint64_t>(InnerEngine::kGloo)) wishes.inner = static_cast<InnerEngine>(inner);
  wishes.has_kernels = (word & kHasKernels) != 0;
  wishes.wants_kernels = (word & kWantsKernels) != 0;
  wishes.deterministic = (word & kDeterministic) != 0;
  wishes.float32_accumulation = (word & kFloat32Accumulation) != 0;
  wishes.may_share_gpu = (word & kMayShareGpu) != 0;
  return wishes;
}

SettledWishes settle_wishes(std::span<const std::uint64_t> words) {
  std::vector<Wishes> all;
  for (const std::uint64_t word : words) all.push_back(Wishes::unpack(word));
  SettledWishes settled;

  const auto by = [&](InnerEngine engine) {
    return [engine](const Wishes& each) { return each.inner == engine; };
  };
  const bool some_nccl = std::any_of(all.begin(), all.end(), by(InnerEngine::kNccl));
  const bool some_gloo = std::any_of(all.begin(), all.end(), by(InnerEngine::kGloo));
  const bool some_none = std::any_of(all.begin(), all.end(), by(InnerEngine::kNone));
  if (some_nccl && some_gloo) {
    settled.why_no_messages = "FCCL_CUDA_INNER is gloo on " + ranks_with(all, by(InnerEngine::kGloo)) +
                              " and nccl, the default, on " + ranks_with(all, by(InnerEngine::kNccl)) +
                              "; set it on all ranks or on none";
    settled.why_no_collectives = settled.why_no_messages;
  } else if ((some_nccl || some_gloo) && some_none) {
    settled.why_no_collectives = ranks_with(all, by(InnerEngine::kNone)) +
                                 (some_gloo ? " cannot carry CUDA tensors by Gloo (FCCL_CUDA_INNER=gloo): "
                                            : " cannot carry CUDA tensors by NCCL: ") +
                                 "the torch there has none, or sees no GPU";
  }

  const auto lacks = [](const Wishes& each) { return !each.has_kernels; };
  settled.somebody_wants_kernels =
      std::any_of(all.begin(), all.end(), [](const Wishes& each) { return each.wants_kernels; });
  if (!settled.somebody_wants_kernels) {
    settled.why_no_kernels = "FCCL_CUDA_KERNELS is not 1";
  } else if (auto why = split_over(all, &Wishes::wants_kernels, "FCCL_CUDA_KERNELS"); !why.empty()) {
    settled.why_no_kernels = why + "; all ranks must ask for them";
  } else if (std::any_of(all.begin(), all.end(), lacks)) {
    settled.why_no_kernels = "the build of fccl on " + ranks_with(all, lacks) + " has no CUDA kernels";
  }
  if (!settled.why_no_kernels.empty()) return settled;

  const auto note = [&](bool Wishes::* wish, const char* name) {
    if (const std::string why = split_over(all, wish, name); !why.empty())
      settled.not_unanimous += (settled.not_unanimous.empty() ? "" : "; ") + why;
  };
  note(&Wishes::deterministic, "FCCL_CUDA_DETERMINISTIC");
  note(&Wishes::float32_accumulation, "FCCL_CUDA_FLOAT32_ACCUMULATION");
  note(&Wishes::may_share_gpu, "FCCL_CUDA_SHARED_GPU");
  return settled;
}

}  // namespace fccl::cuda
