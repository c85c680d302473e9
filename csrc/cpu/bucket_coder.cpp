#include "cpu/bucket_coder.h"

#include <cstring>
#include <utility>

#include "cpu/kernels/block_code.h"
#include "cpu/kernels/reduce.h"

namespace fccl::cpu {
namespace {

void clear(std::byte* shard, std::uint64_t from, std::uint64_t to) {
  if (from < to) std::memset(shard + from, 0, to - from);
}

}  // namespace

BucketCoder::BucketCoder(codec::BlockFormat format, std::uint32_t block, int world_size,
                         const std::vector<BucketRange>& ranges)
    : format_(format), runs_(codec::number_runs(format, block, world_size, ranges)) {}

template <class Visit>
void BucketCoder::for_each_coded(Visit visit) const {
  const std::uint64_t block = layout().block;
  for (const codec::BucketRuns::Run& run : runs_.coded) {
    const std::uint64_t blocks = codec::BucketLayout::blocks_of(run.range.length, layout().block);
    std::uint64_t done = 0;  // elements of the range
    codec::for_each_part(
        run.first, blocks, layout().blocks_per_shard,
        [&](std::uint64_t shard, std::uint64_t at, std::uint64_t part) {
          const std::uint64_t left = run.range.length - done;
          const std::uint64_t count = part * block < left ? part * block : left;
          float* const rest = run.range.remainder;
          visit(Part{shard, at, run.range.begin + done, count, rest == nullptr ? nullptr : rest + done});
          done += count;
        });
  }
}

template <class Visit>
void BucketCoder::for_each_exempt(Visit visit) const {
  for (const codec::BucketRuns::Run& run : runs_.exempt) {
    std::uint64_t done = 0;
    codec::for_each_part(run.first, run.range.length, layout().exempt_per_shard,
                         [&](std::uint64_t shard, std::uint64_t at, std::uint64_t count) {
                           visit(Part{shard, at, run.range.begin + done, count, nullptr});
                           done += count;
                         });
  }
}

// The kernels clear what a short block leaves of its slot; here is the rest that holds nothing.
void BucketCoder::clear_unused(std::uint64_t rank, std::byte* shard) const {
  const std::uint64_t blocks = layout().blocks_in(rank);
  clear(shard, layout().codes_at(blocks), layout().codes_at(layout().blocks_per_shard));
  clear(shard, layout().scale_at(blocks), layout().exempt_at(0));
  clear(shard, layout().exempt_at(layout().exempt_in(rank)), layout().shard_bytes());
}

void BucketCoder::encode(const float* bucket, std::byte* wire) const {
  const BlockKernels& kernels = block_kernels(format_);
  for_each_coded([&](const Part& part) {
    std::byte* const shard = wire + part.shard * layout().shard_bytes();
    kernels.encode(bucket + part.begin, part.remainder, part.count, layout().block,
                   shard + layout().codes_at(part.at), shard + layout().scale_at(part.at));
  });
  for_each_exempt([&](const Part& part) {
    std::memcpy(wire + part.shard * layout().shard_bytes() + layout().exempt_at(part.at), bucket + part.begin,
                part.count * sizeof(float));
  });
  for (std::uint64_t rank = 0; rank < layout().world; ++rank)
    clear_unused(rank, wire + rank * layout().shard_bytes());
}

void BucketCoder::average(int rank, const std::byte* received, int divisor, std::byte* shard) const {
  const BlockKernels& kernels = block_kernels(format_);
  const auto own = static_cast<std::uint64_t>(rank);
  const int sources = static_cast<int>(layout().world);
  std::vector<CodedRun> runs(layout().world);
  for_each_coded([&](const Part& part) {
    if (part.shard != own) return;
    const std::byte* from = received;
    for (CodedRun& run : runs) {
      run = {from + layout().codes_at(part.at), from + layout().scale_at(part.at)};
      from += layout().shard_bytes();
    }
    kernels.mean(runs.data(), sources, rank, part.count, layout().block, divisor, part.remainder,
                 shard + layout().codes_at(part.at), shard + layout().scale_at(part.at));
  });
  if (const std::uint64_t count = layout().exempt_in(own)) {
    std::vector<const void*> from;
    for (std::uint64_t r = 0; r < layout().world; ++r)
      from.push_back(received + r * layout().shard_bytes() + layout().exempt_at(0));
    find_reduce(DType::kFloat32, ReduceOp::kAvg)(shard + layout().exempt_at(0), nullptr, from.data(), sources,
                                                 count, divisor);
  }
  clear_unused(own, shard);
}

void BucketCoder::decode(const std::byte* wire, float* bucket) const {
  const BlockKernels& kernels = block_kernels(format_);
  for_each_coded([&](const Part& part) {
    const std::byte* const shard = wire + part.shard * layout().shard_bytes();
    kernels.decode({shard + layout().codes_at(part.at), shard + layout().scale_at(part.at)}, part.count,
                   layout().block, bucket + part.begin);
  });
  for_each_exempt([&](const Part& part) {
    std::memcpy(bucket + part.begin, wire + part.shard * layout().shard_bytes() + layout().exempt_at(part.at),
                part.count * sizeof(float));
  });
}

}  // namespace fccl::cpu
