// Which parts of an address range are free. Only bookkeeping: no memory is touched here.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace fccl::cpu {

// Best fit, and the lowest address among equals: large requests find room long after small ones came and
// went. Neighbouring free parts are joined. Not thread-safe.
class BlockMap {
 public:
  explicit BlockMap(std::uint64_t capacity) { insert(0, capacity); }

  // The offset of `size` bytes (> 0) that are free no longer, or nothing. A multiple of `alignment` if there
  // is room for that.
  std::optional<std::uint64_t> take(std::uint64_t size, std::uint64_t alignment = 1);
  // Makes free what take() gave, or a part of it.
  void give_back(std::uint64_t offset, std::uint64_t size);

  std::uint64_t free_bytes() const noexcept { return free_bytes_; }
  std::size_t parts() const noexcept { return by_offset_.size(); }

 private:
  using Parts = std::map<std::uint64_t, std::uint64_t>;  // offset -> size

  void insert(std::uint64_t offset, std::uint64_t size);
  void erase(Parts::iterator part);

  Parts by_offset_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  // (size, offset)
  std::uint64_t free_bytes_ = 0;
};

}  // namespace fccl::cpu
