#include "c10d/coded_bucket.h"

#include <utility>

#include "c10d/arena_tensors.h"

namespace fccl::hooks {

WireMemory WireMemoryPool::take(std::uint64_t bytes, bool shared) {
  const auto size = static_cast<std::int64_t>(bytes);
  WireMemory memory;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      memory = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!memory.sent.defined() || memory.sent.storage().nbytes() < bytes) {
    memory = {};  // before more is asked for
    const auto options = at::device(device_).dtype(at::kByte);
    memory.sent =
        shared ? c10d_backend::arena_empty({size}, at::kByte, "fccl.hooks") : at::empty({size}, options);
    memory.received = at::empty({size}, options);
  }
  memory.sent = memory.sent.as_strided({size}, {1});
  memory.received = memory.received.as_strided({size}, {1});
  return memory;
}

void WireMemoryPool::give_back(WireMemory memory) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(memory));
}

}  // namespace fccl::hooks
