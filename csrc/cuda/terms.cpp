#include "cuda/terms.h"

#include <algorithm>
#include <utility>

#include "common/text.h"

namespace fccl::cuda {
namespace {

std::string rank(std::size_t r) { return "rank " + std::to_string(r); }

std::string why_of(RankTerms terms) {
  make_printable(terms.why);
  return terms.why;
}

}  // namespace

void RankTerms::refuse(const std::string& reason) noexcept {
  usable = 0;
  copy_text(reason, why);
}

LaunchQuestion Terms::question(Collective collective, ReduceOp op, DType dtype, std::uint64_t bytes) const {
  LaunchQuestion question;
  question.collective = collective;
  question.op = op;
  question.dtype = dtype;
  question.bytes = bytes;
  question.world = world;
  question.link = link;
  question.architecture = architecture;
  question.sm_count = sm_count;
  question.half_bytes = half_bytes;
  question.deterministic = deterministic;
  question.float32_accumulation = float32_accumulation;
  return question;
}

Terms settle_devices(std::span<const RankTerms> ranks) {
  Terms terms;
  terms.world = static_cast<int>(ranks.size());
  const auto no = [&](std::string why) {
    terms.why_not = std::move(why);
    return terms;
  };
  if (ranks.size() < 2) return no("the group has one rank");
  if (ranks.size() > kMaxRanks) {
    return no("the group has " + std::to_string(ranks.size()) + " ranks, and the kernels serve up to " +
              std::to_string(kMaxRanks));
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].protocol != kProtocolVersion) {
      return no(rank(r) + " has version " + std::to_string(ranks[r].protocol) +
                " of the kernels' protocol, and " + "this one " + std::to_string(kProtocolVersion) +
                "; install the same fccl everywhere");
    }
    if (ranks[r].usable != 1) return no(rank(r) + ": " + why_of(ranks[r]));
  }
  const bool may_share =
      std::all_of(ranks.begin(), ranks.end(), [](const RankTerms& each) { return each.may_share_gpu == 1; });
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (std::size_t other = 0; other < r; ++other) {
      // Kernels that wait for each other should run at once, which processes that share a GPU do not: each
      // waits in vain until the GPU has turned to the other process.
      if (!may_share && ranks[r].device.uuid == ranks[other].device.uuid)
        return no(rank(other) + " and " + rank(r) + " share one GPU");
    }
  }
  const auto least = [&](auto member) {
    auto value = member(ranks[0]);
    for (const RankTerms& each : ranks) value = std::min(value, member(each));
    return value;
  };
  terms.architecture = least([](const RankTerms& each) { return each.device.architecture; });
  terms.sm_count = least([](const RankTerms& each) { return each.device.sm_count; });
  terms.half_bytes = least([](const RankTerms& each) { return each.half_bytes; }) / 16 * 16;
  terms.deterministic = least([](const RankTerms& each) { return each.deterministic; }) != 0;
  terms.float32_accumulation = least([](const RankTerms& each) { return each.float32_accumulation; }) != 0;
  if (terms.half_bytes == 0) return no("the workspace has no bytes");
  terms.usable = true;
  return terms;
}

Terms settle(std::span<const RankTerms> ranks) {
  Terms terms = settle_devices(ranks);
  if (!terms.usable) return terms;
  terms.link = Link::kNvlink;
  for (std::size_t from = 0; from < ranks.size(); ++from) {
    for (std::size_t to = 0; to < ranks.size(); ++to) {
      if (from == to) continue;
      const Link link = std::min(ranks[from].links[to], Link::kNvlink);
      terms.link = std::min(terms.link, link);
      if (link == Link::kNone && terms.usable) {
        terms.usable = false;
        terms.why_not = "the GPU of " + rank(from) + " cannot reach that of " + rank(to);
      }
    }
  }
  return terms;
}

}  // namespace fccl::cuda
