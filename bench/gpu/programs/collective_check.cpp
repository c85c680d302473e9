// The communicating kernels with 2, 4 and 8 ranks, each a stream of this process with a workspace of its own.
// Their grids are small, so that all blocks of all ranks are resident at once; a kernel that waits in vain
// ends at its deadline.
//
// The calls and what they should give are those of the tests on fibres (tests/cpp/cuda/world.h).
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checks.h"
#include "cuda/world.h"
#include "workspaces.h"

namespace fccl::gpu_check {
namespace {

using cuda::Algorithm;
using cuda::host::Call;
using cuda::host::Kind;
using cuda::host::Tensors;

constexpr std::size_t kHalfBytes = 1 << 20;

Algorithm algorithm_of(Kind kind) {
  switch (kind) {
    case Kind::kOneShot: return Algorithm::kOneShotAllReduce;
    case Kind::kTwoShot: return Algorithm::kTwoShotAllReduce;
    case Kind::kAllGather: return Algorithm::kOneShotAllGather;
    case Kind::kBroadcast: return Algorithm::kBroadcast;
  }
  return Algorithm::kInner;
}

// One rank's side of a call: its tensors here and on the machine.
template <class Element>
class Side {
 public:
  Side(Machine& machine, const Call& call, int rank, int world)
      : machine_(machine), tensors_(call, rank, world) {
    input_ = upload(tensors_.input_memory());
    output_ = upload(tensors_.output_memory());
  }

  const std::byte* input() {
    const std::byte* const in_output = inside(tensors_.output_memory(), tensors_.input(), output_);
    return in_output != nullptr ? in_output : inside(tensors_.input_memory(), tensors_.input(), input_);
  }
  std::byte* output() { return inside(tensors_.output_memory(), tensors_.output_bytes(), output_); }
  std::uint64_t bytes() const { return tensors_.bytes(); }

  std::string complaint() {
    const std::span<std::byte> memory = tensors_.output_memory();
    machine_.copy_out(memory.data(), output_, memory.size());
    return tensors_.complaint();
  }

 private:
  std::byte* upload(std::span<const std::byte> memory) {
    std::byte* const at = machine_.allocate(memory.size());
    machine_.copy_in(at, memory.data(), memory.size());
    return at;
  }
  // Where on the machine an address of `memory` is; null if it lies elsewhere.
  static std::byte* inside(std::span<const std::byte> memory, const std::byte* address, std::byte* copy) {
    if (address < memory.data() || address >= memory.data() + memory.size()) return nullptr;
    return copy + (address - memory.data());
  }

  Machine& machine_;
  Tensors<Element> tensors_;
  std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
};

template <class Element>
void launch_call(Machine& machine, const RankWorkspaces& workspaces, const Call& call, int rank,
                 Side<Element>& side) {
  const KernelEntry kernel = cuda::find_kernel(
      algorithm_of(call.kind),
      // What only moves bytes has no kernel for 64-bit integers: collectives.cu.
      call.kind >= Kind::kAllGather && Element::kDType == DType::kInt64 ? DType::kInt32 : Element::kDType);
  const cuda::Session session = workspaces.session(rank, cuda::host::description_of(call, Element::kDType));
  const Grid grid{call.blocks, call.threads};
  switch (call.kind) {
    case Kind::kOneShot:
    case Kind::kTwoShot:
      machine.launch(rank, kernel, grid,
                     cuda::AllReduceArgs{session, side.input(), side.output(), side.bytes(), call.op});
      break;
    case Kind::kAllGather:
      machine.launch(rank, kernel, grid,
                     cuda::AllGatherArgs{session, side.input(), side.output(), side.bytes()});
      break;
    case Kind::kBroadcast:
      machine.launch(rank, kernel, grid,
                     cuda::BroadcastArgs{session, side.output(), side.bytes(), call.root});
      break;
  }
}

// Runs the calls one after the other, on all ranks at once. Returns whether the ranks are still in step.
template <class Element>
bool run_calls(Machine& machine, const RankWorkspaces& workspaces, const std::vector<Call>& calls,
               Report& report) {
  // All memory is made first: to allocate may wait for what runs on the device.
  std::vector<std::vector<std::unique_ptr<Side<Element>>>> sides;
  for (const Call& call : calls) {
    sides.emplace_back();
    for (int rank = 0; rank < workspaces.world(); ++rank)
      sides.back().push_back(std::make_unique<Side<Element>>(machine, call, rank, workspaces.world()));
  }
  // Call by call, so that no rank's launches fill a queue that another rank's must pass.
  for (std::size_t i = 0; i < calls.size(); ++i) {
    for (int rank = 0; rank < workspaces.world(); ++rank)
      launch_call<Element>(machine, workspaces, calls[i], rank, *sides[i][static_cast<std::size_t>(rank)]);
  }
  machine.finish();
  const std::string of_type =
      std::string(fccl::name_of(Element::kDType)) + ", " + std::to_string(workspaces.world()) + " ranks";
  if (const std::string failure = workspaces.failure(); !failure.empty()) {
    report.add(of_type, failure);
    return false;
  }
  for (auto& of_call : sides) {
    for (auto& side : of_call) report.add(of_type, side->complaint());
  }
  return true;
}

template <class Element>
std::vector<Call> fixed_calls(int world, bool fast, bool small) {
  std::vector<Call> calls;
  for (const Kind kind : {Kind::kOneShot, Kind::kTwoShot, Kind::kAllGather, Kind::kBroadcast}) {
    for (const std::size_t count : {1, 7, 8, 31, 100, 257, 1000, 3001}) {
      if (small && count > 300) continue;
      for (const std::size_t offset : {0, 1}) {
        Call call;
        call.kind = kind;
        call.count = count;
        call.offset = offset;
        call.in_place = (count + offset) % 2 == 0;
        call.blocks = count > 50 ? 2 : 1;
        call.threads = fast ? 32u << (count % 5) : 8;
        call.root = static_cast<int>(count % static_cast<std::size_t>(world));
        call.op = count % 3 == 0 ? ReduceOp::kMax : ReduceOp::kSum;
        call.seed = count * 2 + offset;
        calls.push_back(call);
      }
    }
  }
  for (const ReduceOp op :
       {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
    if (op == ReduceOp::kAvg && !cuda::is_float<Element>) continue;
    for (const Kind kind : {Kind::kOneShot, Kind::kTwoShot}) {
      Call call;
      call.kind = kind;
      call.op = op;
      call.count = 2000;  // enough for pairs of NaN, inf and zeros of either sign
      call.blocks = 4;
      call.threads = fast ? 64 : 8;
      call.seed = 1000 + static_cast<std::uint64_t>(op);
      calls.push_back(call);
    }
  }
  return calls;
}

// Grids and kinds that differ from one call to the next, so that fast ranks run ahead of slow ones.
std::vector<Call> random_calls(std::uint64_t seed, int world, std::size_t count, bool floats, bool fast) {
  std::vector<Call> calls = cuda::host::random_calls(seed, world, count, fast ? 4000 : 100);
  for (Call& call : calls) {
    if (call.op == ReduceOp::kAvg && !floats) call.op = ReduceOp::kSum;
    if (!fast) continue;
    call.threads = 32 * (1 + call.threads % 8);
    call.blocks = 1 + static_cast<unsigned>(call.seed % 6);
  }
  return calls;
}

template <class Element>
void check_element(Machine& machine, const Effort& effort, Report& report) {
  const bool fast = machine.is_fast();
  for (const int world : {2, 4, 8}) {
    const RankWorkspaces workspaces(machine, world, kHalfBytes, 1, effort.timeout_s);
    std::vector<Call> calls = fixed_calls<Element>(world, fast, effort.small || !fast);
    const std::size_t more = fast && !effort.small ? 300 : 20;
    for (const Call& call : random_calls(effort.seed + static_cast<std::uint64_t>(world), world, more,
                                         cuda::is_float<Element>, fast))
      calls.push_back(call);
    const bool in_step = run_calls<Element>(machine, workspaces, calls, report);
    machine.release_all();
    if (!in_step) return;
  }
}

// The number of a launch has 64 bits; nothing on its way may cut it to 32, or to its last bit.
void check_generations(Machine& machine, const Effort& effort, Report& report) {
  for (const std::uint64_t first :
       {std::uint64_t{0xfffffffc}, std::uint64_t{0x7ffffffc}, ~std::uint64_t{0} - 20}) {
    const RankWorkspaces workspaces(machine, 4, kHalfBytes, first, effort.timeout_s);
    const bool in_step = run_calls<cuda::Float32>(
        machine, workspaces, random_calls(effort.seed + first, 4, 10, true, machine.is_fast()), report);
    machine.release_all();
    if (!in_step) return;
  }
}

}  // namespace

void check_collectives(Machine& machine, const Effort& effort, Report& report) {
  check_element<cuda::Float32>(machine, effort, report);
  check_element<cuda::Float64>(machine, effort, report);
  check_element<cuda::Float16>(machine, effort, report);
  check_element<cuda::BFloat16>(machine, effort, report);
  check_element<cuda::Int32>(machine, effort, report);
  check_element<cuda::Int64>(machine, effort, report);
  check_generations(machine, effort, report);
}

}  // namespace fccl::gpu_check
