// fccl's kernels, compiled for the host, by the names that nvcc gives to those for the device.
#include <map>
#include <mutex>
#include <typeinfo>

#include "cuda/all_reduce.h"
#include "cuda/bucket_kernels.h"
#include "cuda/gather_broadcast.h"
#include "cuda/launcher.h"
#include "cuda/pack.h"
#include "kernels.h"
#include "simulation.h"

namespace fccl::sim {
namespace {

using namespace ::fccl::cuda;
namespace codec = ::fccl::codec;

template <class Kernel>
std::function<void()> prepare(const Grid& grid, void** parameters) {
  const auto args = *static_cast<const typename Kernel::Args*>(parameters[0]);
  return [grid, args] {
    // Its fibres are used again by the stream's next kernel.
    thread_local host::Launcher launcher(1);
    launcher.add<Kernel>(0, grid.blocks, grid.threads, args);
    if (launcher.run() != 0) break_context();
  };
}

using Table = std::map<std::string, Prepare>;

template <class... Kernels>
void add(Table& table) {
  (table.emplace(demangled(typeid(Kernels).name()), &prepare<Kernels>), ...);
}

template <class... Elements>
void add_reductions(Table& table) {
  add<OneShotAllReduce<Elements>...>(table);
  add<TwoShotAllReduce<Elements>...>(table);
}
template <class... Elements>
void add_moves(Table& table) {
  add<OneShotAllGather<Elements>...>(table);
  add<Broadcast<Elements>...>(table);
}
template <class Code, int kBlock, class... Sources>
void add_buckets(Table& table) {
  add<EncodeBucket<Sources, Code, kBlock>...>(table);
  add<DecodeBucket<Sources, Code, kBlock>...>(table);
  add<ReduceShard<Code, kBlock>>(table);
}
template <class Code>
void add_byte_codes(Table& table) {
  add_buckets<Code, 128, FloatSource, Float16Source, BFloat16Source>(table);
  add_buckets<Code, 256, FloatSource, Float16Source, BFloat16Source>(table);
}

const Table& table() {
  static const Table* const all = [] {
    auto* made = new Table();
    add_reductions<Float32, Float64, Float16, BFloat16, Int32, Int64>(*made);
    add_moves<Float32, Float64, Float16, BFloat16, Int32>(*made);
    add_byte_codes<codec::Int8Code>(*made);
    add_byte_codes<codec::Float8E4M3Code>(*made);
    add_byte_codes<codec::Float8E5M2Code>(*made);
    add_buckets<codec::Float16Code, 256, FloatSource>(*made);
    add_buckets<codec::BFloat16Code, 256, FloatSource>(*made);
    return made;
  }();
  return *all;
}

}  // namespace

Prepare find_fccl_kernel(const std::string& name) {
  const std::string before = "void fccl::cuda::entry<";
  if (name.rfind(before, 0) != 0) return {};
  const std::size_t end = name.rfind(">(");
  std::string kernel = name.substr(before.size(), end - before.size());
  while (!kernel.empty() && kernel.back() == ' ') kernel.pop_back();
  const auto found = table().find(kernel);
  return found == table().end() ? Prepare() : found->second;
}

}  // namespace fccl::sim
