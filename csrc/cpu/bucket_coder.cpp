#include "cpu/bucket_coder.h"

#include <cstring>
#include <utility>

#include "cpu/kernels/block_code.h"
#include "cpu/kernels/reduce.h"

namespace fccl::cpu {
namespace {

struct CodeSize {
  int bytes;
  bool scaled;
};

CodeSize size_of_code(codec::BlockFormat format) {
  switch (format) {
    case codec::BlockFormat::kBFloat16: return {2, false};
    case codec::BlockFormat::kFloat16: return {2, true};
    case codec::BlockFormat::kInt8:
    case codec::BlockFormat::kFloat8E4M3:
    case codec::BlockFormat::kFloat8E5M2: break;
  }
  return {1, true};
}

void clear(std::byte* shard, std::uint64_t from, std::uint64_t to) {
  if (from < to) std::memset(shard + from, 0, to - from);
}

}  // namespace

BucketCoder::BucketCoder(codec::BlockFormat format, std::uint32_t block, int world_size,
                         std::vector<BucketRange> ranges)
    : format_(format) {
  std::uint64_t blocks = 0;
  std::uint64_t exempt = 0;
  for (const BucketRange& range : ranges) {
    if (range.length == 0) continue;
    if (range.exempt) {
      exempt_.push_back({range, exempt});
      exempt += range.length;
    } else {
      coded_.push_back({range, blocks});
      blocks += codec::BucketLayout::blocks_of(range.length, block);
    }
  }
  const CodeSize code = size_of_code(format);
  layout_ = codec::BucketLayout::make(blocks, exempt, block, code.bytes, code.scaled, world_size);
}

template <class Visit>
void BucketCoder::for_each_coded(Visit visit) const {
  const std::uint64_t block = layout_.block;
  for (const Run& run : coded_) {
    const std::uint64_t blocks = codec::BucketLayout::blocks_of(run.range.length, layout_.block);
    std::uint64_t done = 0;  // elements of the range
    codec::for_each_part(
        run.first, blocks, layout_.blocks_per_shard,
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
  for (const Run& run : exempt_) {
    std::uint64_t done = 0;
    codec::for_each_part(run.first, run.range.length, layout_.exempt_per_shard,
                         [&](std::uint64_t shard, std::uint64_t at, std::uint64_t count) {
                           visit(Part{shard, at, run.range.begin + done, count, nullptr});
                           done += count;
                         });
  }
}

// The kernels clear what a short block leaves of its slot; here is the rest that holds nothing.
void BucketCoder::clear_unused(std::uint64_t rank, std::byte* shard) const {
  const std::uint64_t blocks = layout_.blocks_in(rank);
  clear(shard, layout_.codes_at(blocks), layout_.codes_at(layout_.blocks_per_shard));
  clear(shard, layout_.scale_at(blocks), layout_.exempt_at(0));
  clear(shard, layout_.exempt_at(layout_.exempt_in(rank)), layout_.shard_bytes());
}

void BucketCoder::encode(const float* bucket, std::byte* wire) const {
  const BlockKernels& kernels = block_kernels(format_);
  for_each_coded([&](const Part& part) {
    std::byte* const shard = wire + part.shard * layout_.shard_bytes();
    kernels.encode(bucket + part.begin, part.remainder, part.count, layout_.block,
                   shard + layout_.codes_at(part.at), shard + layout_.scale_at(part.at));
  });
  for_each_exempt([&](const Part& part) {
    std::memcpy(wire + part.shard * layout_.shard_bytes() + layout_.exempt_at(part.at), bucket + part.begin,
                part.count * sizeof(float));
  });
  for (std::uint64_t rank = 0; rank < layout_.world; ++rank)
    clear_unused(rank, wire + rank * layout_.shard_bytes());
}

void BucketCoder::average(int rank, const std::byte* received, int divisor, std::byte* shard) const {
  const BlockKernels& kernels = block_kernels(format_);
  const auto own = static_cast<std::uint64_t>(rank);
  const int sources = static_cast<int>(layout_.world);
  std::vector<CodedRun> runs(layout_.world);
  for_each_coded([&](const Part& part) {
    if (part.shard != own) return;
    const std::byte* from = received;
    for (CodedRun& run : runs) {
      run = {from + layout_.codes_at(part.at), from + layout_.scale_at(part.at)};
      from += layout_.shard_bytes();
    }
    kernels.mean(runs.data(), sources, rank, part.count, layout_.block, divisor, part.remainder,
                 shard + layout_.codes_at(part.at), shard + layout_.scale_at(part.at));
  });
  if (const std::uint64_t count = layout_.exempt_in(own)) {
    std::vector<const void*> from;
    for (std::uint64_t r = 0; r < layout_.world; ++r)
      from.push_back(received + r * layout_.shard_bytes() + layout_.exempt_at(0));
    find_reduce(DType::kFloat32, ReduceOp::kAvg)(shard + layout_.exempt_at(0), nullptr, from.data(), sources,
                                                 count, divisor);
  }
  clear_unused(own, shard);
}

void BucketCoder::decode(const std::byte* wire, float* bucket) const {
  const BlockKernels& kernels = block_kernels(format_);
  for_each_coded([&](const Part& part) {
    const std::byte* const shard = wire + part.shard * layout_.shard_bytes();
    kernels.decode({shard + layout_.codes_at(part.at), shard + layout_.scale_at(part.at)}, part.count,
                   layout_.block, bucket + part.begin);
  });
  for_each_exempt([&](const Part& part) {
    std::memcpy(bucket + part.begin, wire + part.shard * layout_.shard_bytes() + layout_.exempt_at(part.at),
                part.count * sizeof(float));
  });
}

}  // namespace fccl::cpu
