#include "cuda/bucket_passes.h"

#include <algorithm>
#include <cstring>

namespace fccl::cuda {
namespace {

constexpr std::uint64_t kLanes = 32;
constexpr std::uint64_t kWarpsPerBlock = kBucketThreads / kLanes;

}  // namespace

BucketPasses::BucketPasses(const Coding& coding, int world_size,
                           const std::vector<codec::BucketRange>& ranges, void* bucket)
    : coding_(coding) {
  const codec::BucketRuns runs = codec::number_runs(coding.code, coding.block, world_size, ranges);
  layout_ = runs.layout;
  auto* const data = static_cast<std::byte*>(bucket);
  const auto append = [&](const std::vector<codec::BucketRuns::Run>& some) {
    for (const auto& run : some) {
      tables_.push_back({data + run.range.begin * size_of(coding.gradients), run.range.remainder,
                         run.range.length, run.first});
    }
  };
  append(runs.coded);
  coded_count_ = tables_.size();
  append(runs.exempt);
}

// Padding has no say: a Range has none.
bool BucketPasses::operator==(const BucketPasses& other) const noexcept {
  static_assert(sizeof(Range) == 32);
  return coding_.gradients == other.coding_.gradients && coding_.code == other.coding_.code &&
         coding_.block == other.coding_.block && layout_.world == other.layout_.world &&
         coded_count_ == other.coded_count_ && tables_.size() == other.tables_.size() &&
         std::memcmp(tables_.data(), other.tables_.data(), tables_.size() * sizeof(Range)) == 0;
}

RangeTable BucketPasses::coded(const Range* tables) const {
  return {tables, static_cast<std::uint32_t>(coded_count_)};
}

RangeTable BucketPasses::exempt(const Range* tables) const {
  return {tables + coded_count_, static_cast<std::uint32_t>(tables_.size() - coded_count_)};
}

void BucketPasses::encode(const Place& place, std::byte* wire) const {
  const EncodeBucketArgs args{layout_, coded(place.tables), exempt(place.tables), wire};
  const std::uint64_t slots = layout_.blocks_per_shard * layout_.world;
  const std::uint64_t exempt_slots = layout_.exempt_per_shard * layout_.world;
  launch(place, BucketKernel::kEncode, std::max(slots, exempt_slots / kLanes), &args);
}

void BucketPasses::average(const Place& place, int rank, const std::byte* received, const float* divisor,
                           std::byte* shard) const {
  const ReduceShardArgs args{
      layout_, coded(place.tables), received, shard, divisor, static_cast<std::uint32_t>(rank)};
  launch(place, BucketKernel::kReduce, std::max(layout_.blocks_per_shard, layout_.exempt_per_shard / kLanes),
         &args);
}

void BucketPasses::decode(const Place& place, const std::byte* wire) const {
  const DecodeBucketArgs args{layout_, coded(place.tables), exempt(place.tables), wire, nullptr};
  launch(place, BucketKernel::kDecode, std::max(layout_.blocks, layout_.exempt / kLanes), &args);
}

void BucketPasses::launch(const Place& place, BucketKernel kernel, std::uint64_t warps,
                          const void* args) const {
  const auto most = static_cast<std::uint64_t>(place.sm_count) *
                    static_cast<std::uint64_t>(bucket_blocks_per_multiprocessor(kernel, coding_.block));
  const std::uint64_t blocks = (warps + kWarpsPerBlock - 1) / kWarpsPerBlock;
  BucketLaunch launch;
  launch.kernel = kernel;
  launch.gradients = coding_.gradients;
  launch.code = coding_.code;
  launch.block = coding_.block;
  launch.blocks =
      static_cast<unsigned>(std::clamp<std::uint64_t>(blocks, 1, std::max<std::uint64_t>(most, 1)));
  launch.threads = kBucketThreads;
  place.runtime.launch(launch, args, place.stream);
}

}  // namespace fccl::cuda
