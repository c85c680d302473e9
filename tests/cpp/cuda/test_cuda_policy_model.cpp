// The model of docs/cuda.md ("When which algorithm wins"), from which the policy's thresholds were chosen.
#include "cuda/questions.h"

namespace fccl::cuda {
namespace {

using namespace questions;

// Times are in microseconds.
struct Fabric {
  double ours;  // GB/s out of a GPU
  double nccl;
  double hop;  // microseconds of NCCL's for one step of a ring or tree
};
Fabric fabric_of(Link link, int architecture) {
  if (link == Link::kPcie) return {10, 12, 1.8};
  if (architecture == 80) return {200, 235, 0.9};
  if (architecture / 10 == 9) return {300, 370, 0.9};
  if (architecture / 10 == 10) return {600, 740, 0.9};
  return {37, 46, 0.9};
}
double model(Algorithm algorithm, const LaunchQuestion& q) {
  const double transfer = static_cast<double>(q.bytes) / 1e3 / fabric_of(q.link, q.architecture).ours;
  const double peers = q.world - 1;
  if (algorithm == Algorithm::kTwoShotAllReduce) return 12 + 2 * peers / q.world * transfer;
  return 5 + peers * transfer;
}
double model_of_nccl(const LaunchQuestion& q) {
  const Fabric fabric = fabric_of(q.link, q.architecture);
  const double transfer = static_cast<double>(q.bytes) / 1e3 / fabric.nccl;
  const double peers = q.world - 1;
  if (q.collective == Collective::kAllReduce) {
    return 8 + 2 * peers * fabric.hop + 2 * peers / q.world * transfer;
  }
  return 8 + peers * fabric.hop + (q.collective == Collective::kAllGather ? peers : 1) * transfer;
}

// Thresholds are the model's or smaller: where ours are chosen, the model has them in front.
TEST(CudaPolicy, thresholds_follow_from_the_model) {
  for_each_question([&](LaunchQuestion q) {
    if (q.deterministic || q.float32_accumulation || q.dtype != DType::kFloat32) return;
    if (q.half_bytes < 256 * MiB) return;  // for want of space another algorithm may be chosen
    for (const std::uint64_t bytes : sizes()) {
      q.bytes = bytes;
      const LaunchPlan plan = plan_launch(q);
      if (plan.algorithm == Algorithm::kInner) continue;
      const double time = model(plan.algorithm, q);
      const double allowed = q.op == ReduceOp::kAvg ? 1.125 : 1.0;
      EXPECT_LE(time, allowed * model_of_nccl(q)) << name_of(plan.algorithm) << ", " << text(q);
      if (plan.algorithm == Algorithm::kOneShotAllReduce) {
        EXPECT_LE(time, model(Algorithm::kTwoShotAllReduce, q)) << text(q);
      }
    }
  });
}

// The model itself against the published figures it was fitted to (docs/cuda.md has the addresses).
TEST(CudaPolicy, the_model_fits_published_figures) {
  const auto within = [](double model, double published, double factor) {
    EXPECT_LT(model, published * factor);
    EXPECT_GT(model, published / factor);
  };
  LaunchQuestion q{Collective::kAllReduce, ReduceOp::kSum, DType::kFloat16, 0, 4, Link::kPcie, 80, 80, MiB};
  const auto at = [&](std::uint64_t bytes) {
    q.bytes = bytes;
    return q;
  };
  // One-shot push on four V100 behind a PCIe switch, and NCCL there.
  within(model(Algorithm::kOneShotAllReduce, at(32 * KiB)), 11.8, 1.3);
  within(model(Algorithm::kOneShotAllReduce, at(128 * KiB)), 44.5, 1.3);
  within(model(Algorithm::kOneShotAllReduce, at(384 * KiB)), 120.3, 1.3);
  within(model_of_nccl(at(4 * KiB)), 19.4, 1.3);
  within(model_of_nccl(at(32 * KiB)), 24.2, 1.3);
  within(model_of_nccl(at(128 * KiB)), 51.8, 1.6);
  within(model_of_nccl(at(384 * KiB)), 83.5, 1.3);
  // vLLM's kernels and NCCL on six GPUs.
  q.world = 6;
  q.link = Link::kNvlink;
  q.architecture = 90;
  within(model(Algorithm::kOneShotAllReduce, at(512 * KiB)), 13, 1.3);
  within(model(Algorithm::kOneShotAllReduce, at(4 * MiB)), 70, 1.3);
  within(model(Algorithm::kTwoShotAllReduce, at(1 * MiB)), 17, 1.3);
  within(model(Algorithm::kTwoShotAllReduce, at(4 * MiB)), 37, 1.3);
  within(model_of_nccl(at(512 * KiB)), 23, 1.3);
  // NCCL on eight H100.
  q.world = 8;
  within(model_of_nccl(at(128)), 19.2, 1.3);
  within(model_of_nccl(at(256 * KiB)), 24.8, 1.3);
  within(model_of_nccl(at(4 * MiB)), 59.4, 1.6);
}

}  // namespace
}  // namespace fccl::cuda
