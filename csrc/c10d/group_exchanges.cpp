#include "c10d/group_exchanges.h"

#include <cstring>
#include <vector>

namespace fccl::hooks {
namespace {

// torch 2.13 renamed these two, and warns of the old names.
template <class Group>
auto start_all_to_all(Group& group, at::Tensor& output, at::Tensor& input) {
  std::vector<std::int64_t> even;
  if constexpr (requires { group.all_to_all_single(output, input, even, even); }) {
    return group.all_to_all_single(output, input, even, even);
  } else {
    return group.alltoall_base(output, input, even, even);
  }
}
template <class Group>
auto start_all_gather(Group& group, at::Tensor& output, at::Tensor& input) {
  if constexpr (requires { group.all_gather_single(output, input); }) {
    return group.all_gather_single(output, input);
  } else {
    return group._allgather_base(output, input);
  }
}

}  // namespace

void OverGroup::all_to_all(at::Tensor input, at::Tensor output) {
  wait(start_all_to_all(group_, output, input));
}

// On the CPU the form with lists, which groups written in Python can have; on a device the one that copies
// nothing.
void OverGroup::all_gather(at::Tensor input, at::Tensor output) {
  if (!input.is_cpu()) return wait(start_all_gather(group_, output, input));
  std::vector<at::Tensor> inputs{std::move(input)};
  std::vector<std::vector<at::Tensor>> outputs{output.tensor_split(size())};
  wait(group_.allgather(outputs, inputs));
}

void OverGroup::sum(const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  wait(group_.allreduce(tensors));
}

void OverGroup::wait(const c10::intrusive_ptr<::c10d::Work>& work) {
  TORCH_CHECK(work, "the process group's backend returned no Work, which a compressing hook needs");
  work->wait();
  // Not every kind of Work raises what it ended with, nor has a Future: c10d's base class throws.
  FuturePtr future;
  try {
    future = work->getFuture();
  } catch (const c10::Error&) {
    return;
  }
  if (future) future->waitAndThrow();
}

std::int64_t compare(OverGroup& over, c10::Device device, const Announcement& own) {
  const std::int64_t bytes = sizeof(Announcement);
  at::Tensor mine = at::empty({bytes}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), &own, sizeof(own));
  at::Tensor all = at::empty({over.size() * bytes}, at::device(device).dtype(at::kByte));
  over.all_gather(mine.to(device), all);
  all = all.cpu();
  std::vector<Announcement> announcements(static_cast<std::size_t>(over.size()));
  std::memcpy(announcements.data(), all.const_data_ptr(), announcements.size() * sizeof(Announcement));
  std::vector<Description> calls;
  std::int64_t with_data = 0;
  for (Announcement& each : announcements) {
    each.call.validate();
    calls.push_back(each.call);
    if (each.has_data != 0) ++with_data;
  }
  const std::string verdict = check_compatible(calls);
  TORCH_CHECK_WITH(DistBackendError, verdict.empty(), "fccl ", own.call.to_string(), " on rank ", over.rank(),
                   ": ", verdict);
  return with_data;
}

std::string current_error() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace fccl::hooks
