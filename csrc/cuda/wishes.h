// What each rank wants of a group's CUDA tensors, told when the group is made, and what follows for all.
//
// Who carries a collective must be settled alike on all ranks: one that goes to NCCL where its peers launch
// kernels waits for them, and they for it, until a timeout says so. An environment that differs from rank to
// rank is a common mistake, so it is compared before the first call and answered in words. Each rank packs
// its wishes into one word, all read all words, and settle_wishes() is a pure function of these.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace fccl::cuda {

// What carries CUDA tensors where fccl's kernels do not.
enum class InnerEngine : std::uint8_t {
  kNone = 0,  // this rank sees no GPU, or its torch lacks what is asked for
  kNccl = 1,
  kGloo = 2,  // FCCL_CUDA_INNER=gloo
};

struct Wishes {
  InnerEngine inner = InnerEngine::kNone;
  bool has_kernels = false;           // this build
  bool wants_kernels = false;         // FCCL_CUDA_KERNELS=1
  bool deterministic = false;         // FCCL_CUDA_DETERMINISTIC=1
  bool float32_accumulation = false;  // FCCL_CUDA_FLOAT32_ACCUMULATION=1
  bool may_share_gpu = false;         // FCCL_CUDA_SHARED_GPU=1

  bool operator==(const Wishes&) const = default;

  std::uint64_t pack() const noexcept;
  // Of any 64 bits: a peer's word is a stranger's.
  static Wishes unpack(std::uint64_t word) noexcept;
};

// The same on all ranks.
struct SettledWishes {
  std::string why_no_kernels;  // empty: all have them and want them
  bool somebody_wants_kernels = false;
  // Why no collective on CUDA tensors can be carried at all; empty if it can.
  std::string why_no_collectives;
  // The same for messages, which only their two ranks take part in.
  std::string why_no_messages;
  // Wishes about kernels that some ranks have and some have not, and that therefore do not hold; or empty.
  std::string not_unanimous;
};

// `words` by rank.
SettledWishes settle_wishes(std::span<const std::uint64_t> words);

}  // namespace fccl::cuda
