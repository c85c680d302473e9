// What check_sass.py must find: an encoder whose lanes read single floats and write single bytes, and one
// that writes its remainders two at a time.
#include "codec/block.h"
#include "cuda/lanes.h"

namespace fccl::cuda {
namespace bad {

struct Args {
  const float* gradients;
  float* remainders;
  std::byte* codes;
};

template <class Source, class Code, int kBlock>
struct EncodeBucket {
  static constexpr int kThreads = 32;
  static constexpr int kBlocksPerMultiprocessor = 1;
  using Args = bad::Args;
  FCCL_KERNEL static void run(const Args& args) {
    FCCL_UNROLL
    for (unsigned i = 0; i < kBlock / 32; ++i) {
      const unsigned at = i * 32 + lane_index();
      store(args.codes + at, static_cast<std::byte>(load(args.gradients + at)));
    }
  }
};

template <class Code, int kBlock>
struct ReduceShard {
  static constexpr int kThreads = 32;
  static constexpr int kBlocksPerMultiprocessor = 1;
  using Args = bad::Args;
  FCCL_KERNEL static void run(const Args& args) {
    const Vector four = load(reinterpret_cast<const Vector*>(args.gradients) + lane_index());
    auto* const halves = reinterpret_cast<HalfVector*>(args.remainders) + 2 * lane_index();
    const std::uint32_t code = load(reinterpret_cast<const std::uint32_t*>(args.codes) + lane_index());
    store(halves, HalfVector{{four.word[0] + code, four.word[1]}});
    sync();
    store(halves + 1, HalfVector{{four.word[2], four.word[3]}});
    store(reinterpret_cast<std::uint32_t*>(args.codes) + lane_index(), four.word[0]);
  }
};

}  // namespace bad

template __global__ void entry<bad::EncodeBucket<FloatSource, codec::Int8Code, 128>>(
    const __grid_constant__ bad::Args);
template __global__ void entry<bad::ReduceShard<codec::Float8E5M2Code, 128>>(
    const __grid_constant__ bad::Args);

}  // namespace fccl::cuda
