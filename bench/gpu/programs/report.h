// What a check program says: each wrong case in a line, and at the end how many there were.
#pragma once

#include <cstddef>
#include <iostream>
#include <string>

namespace fccl::gpu_check {

class Report {
 public:
  // `complaint`: empty if the case came out right.
  void add(const std::string& what, const std::string& complaint) {
    ++cases_;
    if (complaint.empty()) return;
    constexpr std::size_t kMostLines = 20;
    if (++wrong_ <= kMostLines) std::cout << "WRONG: " << what << ": " << complaint << std::endl;
  }
  std::size_t cases() const { return cases_; }
  std::size_t wrong() const { return wrong_; }

 private:
  std::size_t cases_ = 0;
  std::size_t wrong_ = 0;
};

}  // namespace fccl::gpu_check
