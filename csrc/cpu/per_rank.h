// One value for each rank, without an allocation where ranks are few.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace fccl::cpu {

template <typename T>
class PerRank {
 public:
  explicit PerRank(int ranks) {
    if (static_cast<std::size_t>(ranks) > few_.size()) many_.resize(static_cast<std::size_t>(ranks));
    data_ = many_.empty() ? few_.data() : many_.data();
  }
  PerRank(const PerRank&) = delete;
  PerRank& operator=(const PerRank&) = delete;

  T& operator[](int rank) { return data_[rank]; }
  const T* data() const { return data_; }

 private:
  std::array<T, 16> few_{};
  std::vector<T> many_;
  T* data_;
};

}  // namespace fccl::cpu
