#include "c10d/arena_tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "c10d/process.h"
#include "cpu/arena.h"

namespace fccl::c10d_backend {
namespace {

void free_block(void* data) {
  // In a forked child this is another arena, to which the block does not belong.
  if (cpu::Arena* arena = cpu::Arena::of_process()) arena->free(static_cast<std::byte*>(data));
}

class ArenaAllocator final : public c10::Allocator {
 public:
  explicit ArenaAllocator(std::string owner) : owner_(std::move(owner)) {}

  c10::DataPtr allocate(std::size_t size) override {
    if (size == 0) return {nullptr, c10::Device(c10::kCPU)};
    cpu::Arena* arena = cpu::Arena::of_process();
    std::byte* data = arena != nullptr ? arena->allocate(size, owner_) : nullptr;
    if (data != nullptr) return {data, data, &free_block, c10::Device(c10::kCPU)};
    static std::atomic<bool> told{false};
    if (!cpu::Arena::is_turned_off() && !told.exchange(true)) {
      warn("fccl: there is no shared memory for " + std::to_string(size) + " bytes (" +
           (arena == nullptr ? cpu::Arena::why_none() : "fccl.memory_stats() says what is in use") +
           "); this tensor and perhaps later ones are ordinary, which is right but slower in collectives.");
    }
    return c10::GetCPUAllocator()->allocate(size);
  }

  void copy_data(void* to, const void* from, std::size_t size) const override {
    default_copy_data(to, from, size);
  }

 private:
  const std::string owner_;
};

// One for each owner. Never destroyed: storages keep a plain pointer to theirs.
c10::Allocator* allocator_of(const std::string& owner) {
  static std::mutex mutex;
  static auto* all = new std::map<std::string, std::unique_ptr<ArenaAllocator>>();
  const std::lock_guard lock(mutex);
  std::unique_ptr<ArenaAllocator>& allocator = (*all)[owner];
  if (!allocator) allocator = std::make_unique<ArenaAllocator>(owner);
  return allocator.get();
}

}  // namespace

at::Tensor arena_empty(at::IntArrayRef sizes, at::ScalarType dtype, const std::string& owner) {
  return at::detail::empty_generic(sizes, allocator_of(owner), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   dtype, std::nullopt);
}

}  // namespace fccl::c10d_backend
