// A group's operations on the GPU run one after the other, in the order of their calls, on whatever streams
// those were made, and by whichever engine.
//
// Both our kernels and NCCL's wait on the device for their peers. If two such operations could overtake each
// other, one rank might give its multiprocessors to the first and its peer to the second, and both would wait
// for ever. Inside a graph's capture the order is kept among the captured operations only: a graph cannot
// depend on what is outside of it.
#pragma once

#include <cstdint>

#include "cuda/runtime.h"

namespace fccl::cuda {

// Not thread-safe.
class Chain {
 public:
  explicit Chain(Runtime& runtime) : runtime_(runtime) {}
  ~Chain();
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;

  // Before an operation is put on `stream`: the stream waits for the one before.
  void enter(StreamHandle stream);
  // After that: `stream`, the same or another, has waited for its end, or has it itself.
  void leave(StreamHandle stream);

  // Whether the device is done with all of it, graphs apart.
  bool is_idle() const { return eager_.event == nullptr || runtime_.done(eager_.event); }

 private:
  struct Last {
    bool any = false;
    StreamHandle stream = nullptr;
    EventHandle event = nullptr;  // recorded on it; made at first use
  };
  Last& last_for(StreamHandle stream);

  Runtime& runtime_;
  Last eager_;
  Last captured_;
  std::uint64_t capture_ = 0;  // of captured_
};

}  // namespace fccl::cuda
