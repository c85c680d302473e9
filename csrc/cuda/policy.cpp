#include "cuda/policy.h"

#include <algorithm>
#include <cassert>

#include "cuda/all_reduce.h"
#include "cuda/gather_broadcast.h"

namespace fccl::cuda {
namespace {

constexpr std::uint64_t KiB = 1024;
constexpr std::uint64_t MiB = 1024 * KiB;
constexpr std::uint64_t kAnySize = ~std::uint64_t{0};

// ---- Thresholds ----

// What the bandwidth between GPUs is of the order of.
enum class Fabric : std::uint8_t { kPcie, kNvlinkBridge, kNvlinkAmpere, kNvlinkHopper, kNvlinkBlackwell };

Fabric fabric_of(Link link, int architecture) {
  // One row for all of PCIe: the slot decides, not the GPU, and the generation is not known here.
  if (link == Link::kPcie) return Fabric::kPcie;
  if (architecture == 80) return Fabric::kNvlinkAmpere;
  if (architecture >= 90 && architecture < 100) return Fabric::kNvlinkHopper;
  if (architecture >= 100 && architecture < 120) return Fabric::kNvlinkBlackwell;
  return Fabric::kNvlinkBridge;  // workstation GPUs, and whatever is not known: the least bandwidth
}

struct Limits {
  Fabric fabric;
  int worlds_up_to;
  std::uint64_t one_shot;    // up to this one-shot all_reduce is faster than two-shot
  std::uint64_t all_reduce;  // up to this size ours are faster than NCCL's; the same for the others
  std::uint64_t all_gather;
  std::uint64_t broadcast;
};

// Chosen from the model in docs/cuda.md ("When which algorithm wins"); not measured with fccl. Each is the
// model's crossing rounded down to a power of two, or less where somebody's measured threshold is less:
//
//  [v]  vLLM, csrc/custom_all_reduce.cuh: one-shot below 512 KiB up to 4 ranks, 256 KiB up to 8, always for 2
//  [s]  vLLM, vllm/distributed/device_communicators/all_reduce_utils.py, CUSTOM_ALL_REDUCE_MAX_SIZES: sm_100
//       2 MiB for 2 and 4 ranks, 1 MiB for 6 and 8; vLLM's default is 8 MiB (github.com/vllm-project/vllm
//       PR 52555)
//  [t]  TensorRT-LLM, cpp/tensorrt_llm/plugins/ncclPlugin/allreducePlugin.cpp: one-shot for 2 ranks, below
//       1 MB up to 4, 500 KB up to 8
//  [p]  all-to-all writes across a root complex collapse, more so with more blocks
//       (github.com/flashinfer-ai/flashinfer PR 4393): rows for PCIe and 4 ranks and more are held below the
//       model
//
// Two-shot between two ranks would send as much as one-shot, and later.
constexpr Limits kLimits[] = {
    {Fabric::kPcie, 2, kAnySize, 256 * KiB, 256 * KiB, 256 * KiB},
    {Fabric::kPcie, 3, 64 * KiB, 128 * KiB, 64 * KiB, 32 * KiB},
    {Fabric::kPcie, 4, 32 * KiB, 128 * KiB, 64 * KiB, 32 * KiB},  // [p]
    {Fabric::kPcie, 8, 8 * KiB, 64 * KiB, 64 * KiB, 16 * KiB},    // [p]

    {Fabric::kNvlinkBridge, 2, kAnySize, 512 * KiB, 512 * KiB, 512 * KiB},
    {Fabric::kNvlinkBridge, 3, 256 * KiB, 128 * KiB, 256 * KiB, 128 * KiB},
    {Fabric::kNvlinkBridge, 4, 128 * KiB, 128 * KiB, 256 * KiB, 64 * KiB},
    {Fabric::kNvlinkBridge, 8, 32 * KiB, 256 * KiB, 128 * KiB, 32 * KiB},

    {Fabric::kNvlinkAmpere, 2, kAnySize, 4 * MiB, 4 * MiB, 4 * MiB},
    {Fabric::kNvlinkAmpere, 3, 2 * MiB, 1 * MiB, 2 * MiB, 512 * KiB},
    {Fabric::kNvlinkAmpere, 4, 512 * KiB, 1 * MiB, 2 * MiB, 512 * KiB},  // [v]
    {Fabric::kNvlinkAmpere, 8, 256 * KiB, 2 * MiB, 1 * MiB, 256 * KiB},  // [v]

    {Fabric::kNvlinkHopper, 2, kAnySize, 4 * MiB, 4 * MiB, 4 * MiB},
    {Fabric::kNvlinkHopper, 3, 2 * MiB, 1 * MiB, 2 * MiB, 1 * MiB},
    {Fabric::kNvlinkHopper, 4, 512 * KiB, 1 * MiB, 2 * MiB, 512 * KiB},  // [v]
    {Fabric::kNvlinkHopper, 8, 256 * KiB, 2 * MiB, 2 * MiB, 256 * KiB},  // [v]

    {Fabric::kNvlinkBlackwell, 2, kAnySize, 2 * MiB, 2 * MiB, 2 * MiB},     // [s]
    {Fabric::kNvlinkBlackwell, 3, 4 * MiB, 2 * MiB, 2 * MiB, 1 * MiB},      // [s]
    {Fabric::kNvlinkBlackwell, 4, 512 * KiB, 2 * MiB, 2 * MiB, 512 * KiB},  // [v] [s]
    {Fabric::kNvlinkBlackwell, 8, 256 * KiB, 1 * MiB, 1 * MiB, 256 * KiB},  // [v] [s]
};

const Limits& limits_of(Fabric fabric, int world) {
  const Limits* found = nullptr;
  for (const Limits& row : kLimits) {
    if (row.fabric == fabric && world <= row.worlds_up_to && !found) found = &row;
  }
  assert(found);
  return *found;
}

// NCCL averages floats by a product with 1/n, rounded to the tensor's type, before the sum (its PreMulSum),
// and its kernels for symmetric memory only sum (notes of release 2.27.3). Ours divides the float32 sum. For
// that an average goes to ours up to twice the size, where the model puts us behind by an eighth at most.
constexpr std::uint64_t kAverageFactor = 2;

// ---- Kernels ----

// What is built of the reductions (collectives.cu).
bool has_reduction(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kFloat16:
    case DType::kBFloat16: break;
    case DType::kInt32:
    case DType::kInt64:
      if (op == ReduceOp::kAvg) return false;  // truncates a wide sum; the kernels have none
      break;
    default: return false;
  }
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kMax: return true;
    default: return false;
  }
}

// And of what only moves bytes.
DType element_that_moves(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kFloat16:
    case DType::kBFloat16: return dtype;
    default: return DType::kInt32;
  }
}

bool is_16_bit_float(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }
bool accumulates(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kProduct;
}

// Any element does: sizes do not depend on it.
std::uint64_t mailbox_bytes(Algorithm algorithm, std::uint64_t bytes, int world) {
  switch (algorithm) {
    case Algorithm::kOneShotAllReduce: return OneShotAllReduce<Float32>::mailbox_bytes(bytes, world);
    case Algorithm::kTwoShotAllReduce: return TwoShotAllReduce<Float32>::mailbox_bytes(bytes, world);
    case Algorithm::kOneShotAllGather: return OneShotAllGather<Float32>::mailbox_bytes(bytes, world);
    case Algorithm::kBroadcast: return Broadcast<Float32>::mailbox_bytes(bytes, world);
    case Algorithm::kInner: break;
  }
  return 0;
}

bool fits(Algorithm algorithm, const LaunchQuestion& question) {
  constexpr std::uint64_t kNoMemoryIsLarger = std::uint64_t{1} << 48;  // and nothing below it overflows
  return question.bytes <= kNoMemoryIsLarger &&
         mailbox_bytes(algorithm, question.bytes, question.world) <= question.half_bytes;
}

unsigned most_threads(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kOneShotAllReduce: return OneShotAllReduce<Float32>::kThreads;
    case Algorithm::kTwoShotAllReduce: return TwoShotAllReduce<Float32>::kThreads;
    case Algorithm::kOneShotAllGather: return OneShotAllGather<Float32>::kThreads;
    case Algorithm::kBroadcast: return Broadcast<Float32>::kThreads;
    case Algorithm::kInner: break;
  }
  return 0;
}

// ---- The grid ----

// Enough stores on the way to fill the link, and no more: each block adds a signal per peer to wait for, and
// takes a multiprocessor from whatever computes meanwhile. 36 is what vLLM found best on five GPUs with and
// without NVLink (csrc/custom_all_reduce.cuh). Across PCIe more blocks do harm ([p] above), and 8 of 512
// threads have 64 KiB under way to every peer: more than a link of 32 GB/s moves in a microsecond.
constexpr unsigned kMostBlocksNvlink = 36;
constexpr unsigned kMostBlocksPcie = 8;
static_assert(kMostBlocksNvlink <= kMaxBlocks && kMostBlocksPcie <= kMaxBlocks);
static_assert(kWarpSize >= kMaxRanks);  // a warp is enough to signal every peer

std::uint64_t divide_up(std::uint64_t a, std::uint64_t b) { return (a + b - 1) / b; }

LaunchPlan launch(Algorithm algorithm, DType element, const LaunchQuestion& question, const char* reason) {
  std::uint64_t vectors = vectors_in(question.bytes);
  if (algorithm == Algorithm::kTwoShotAllReduce) {
    vectors = divide_up(vectors, static_cast<std::uint64_t>(question.world));  // of a shard
  }
  const unsigned most = most_threads(algorithm);
  // A quarter of the multiprocessors, so that what else may be waiting for its peers on this GPU finds room
  // beside it: another group's kernels, NCCL's channels. Kernels of one group never run at once, but those of
  // two may be scheduled in another order on each rank.
  const unsigned limit = std::min(question.link == Link::kPcie ? kMostBlocksPcie : kMostBlocksNvlink,
                                  std::max(1u, static_cast<unsigned>(question.sm_count) / 4));
  LaunchPlan plan;
  plan.algorithm = algorithm;
  plan.element = element;
  plan.blocks = static_cast<unsigned>(std::min<std::uint64_t>(divide_up(vectors, most), limit));
  plan.threads =
      static_cast<unsigned>(std::min<std::uint64_t>(most, divide_up(vectors, kWarpSize) * kWarpSize));
  plan.reason = reason;
  assert(plan.blocks >= 1 && plan.blocks <= kMaxBlocks);
  assert(plan.blocks <= static_cast<unsigned>(question.sm_count));  // all resident at once: they spin
  assert(plan.threads >= static_cast<unsigned>(question.world) && plan.threads <= most);
  return plan;
}

LaunchPlan inner(const char* reason) {
  LaunchPlan plan;
  plan.reason = reason;
  return plan;
}

// ---- One function per collective ----

LaunchPlan plan_all_reduce(const LaunchQuestion& question, const Limits& limits) {
  if (!has_reduction(question.dtype, question.op)) return inner("no kernel for this type and operation");
  // Beyond its own crossing one-shot sends more than two-shot; before it, two-shot may still be what fits.
  const bool one_shot = question.bytes <= limits.one_shot && fits(Algorithm::kOneShotAllReduce, question);
  const Algorithm algorithm = one_shot ? Algorithm::kOneShotAllReduce : Algorithm::kTwoShotAllReduce;
  if (!fits(algorithm, question)) return inner("larger than the workspace");
  const auto go = [&](const char* reason) { return launch(algorithm, question.dtype, question, reason); };
  const bool average = question.op == ReduceOp::kAvg;
  if (question.bytes <= limits.all_reduce) return go("small: latency decides");
  if (question.deterministic) return go("deterministic results were asked for");
  if (question.float32_accumulation && is_16_bit_float(question.dtype) && accumulates(question.op)) {
    return go("accumulation in float32 was asked for");
  }
  if (average && question.bytes <= kAverageFactor * limits.all_reduce) return go("average: exact in ours");
  return inner("large: bandwidth decides");
}

// Copies: no order of summation, so what the flags ask for holds in either engine.
LaunchPlan plan_move(Algorithm algorithm, std::uint64_t limit, const LaunchQuestion& question) {
  if (question.bytes > limit) return inner("large: bandwidth decides");
  if (!fits(algorithm, question)) return inner("larger than the workspace");
  return launch(algorithm, element_that_moves(question.dtype), question, "small: latency decides");
}

}  // namespace

const char* name_of(Algorithm algorithm) noexcept {
  switch (algorithm) {
    case Algorithm::kInner: return "inner engine";
    case Algorithm::kOneShotAllReduce: return "one-shot all_reduce";
    case Algorithm::kTwoShotAllReduce: return "two-shot all_reduce";
    case Algorithm::kOneShotAllGather: return "one-shot all_gather";
    case Algorithm::kBroadcast: return "broadcast";
  }
  return "unknown";
}

const char* name_of(Link link) noexcept {
  switch (link) {
    case Link::kNone: return "none";
    case Link::kPcie: return "PCIe";
    case Link::kNvlink: return "NVLink";
  }
  return "unknown";
}

LaunchPlan plan_launch(const LaunchQuestion& question) noexcept {
  // Alone there is nobody to send to: whatever copy is left is the inner engine's to make.
  if (question.world <= 1) return inner("one rank");
  if (question.world > kMaxRanks) return inner("more ranks than a workspace has mailboxes for");
  if (question.link != Link::kPcie && question.link != Link::kNvlink)
    return inner("GPUs without peer access");
  if (question.architecture < 80) return inner("no kernels for this architecture");
  if (question.sm_count < 1) return inner("no multiprocessors");
  // Nothing to move, and a launch would only make ranks wait for each other, which no such call promises.
  if (question.bytes == 0) return inner("empty");
  const Limits& limits = limits_of(fabric_of(question.link, question.architecture), question.world);
  switch (question.collective) {
    case Collective::kAllReduce: return plan_all_reduce(question, limits);
    case Collective::kAllGather: return plan_move(Algorithm::kOneShotAllGather, limits.all_gather, question);
    case Collective::kBroadcast: return plan_move(Algorithm::kBroadcast, limits.broadcast, question);
    default: return inner("no kernel for this collective");
  }
}

}  // namespace fccl::cuda
