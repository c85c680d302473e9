// The exchanges of a compressing hook over any process group, whatever carries its tensors.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/ATen.h>

#include "c10d/hook_base.h"
#include "common/description.h"

namespace fccl::hooks {

// Each member waits: for CPU tensors until it is done, for those of a device as far as the current stream is
// concerned.
class OverGroup {
 public:
  explicit OverGroup(ProcessGroup& group) : group_(group) {}

  int rank() const { return group_.getRank(); }
  int size() const { return group_.getSize(); }
  // Equal parts; dense tensors of bytes.
  void all_to_all(at::Tensor input, at::Tensor output);
  void all_gather(at::Tensor input, at::Tensor output);
  // In place.
  void sum(const at::Tensor& tensor);

 private:
  static void wait(const c10::intrusive_ptr<::c10d::Work>& work);

  ProcessGroup& group_;
};

// What the ranks compare before they exchange codes, as fccl's engine does by itself.
struct Announcement {
  Description call;
  std::int64_t has_data = 0;
};

// Over tensors on `device`; waits for all ranks. Returns how many have data. Throws on all ranks, naming the
// calls, if they differ or one of them says that it has failed.
std::int64_t compare(OverGroup& over, c10::Device device, const Announcement& own);

// What went wrong on this rank, while it is handled.
std::string current_error();

}  // namespace fccl::hooks
