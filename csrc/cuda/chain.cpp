#include "cuda/chain.h"

namespace fccl::cuda {

Chain::~Chain() {
  for (Last* last : {&eager_, &captured_}) {
    if (last->event != nullptr) runtime_.destroy_event(last->event);
  }
}

Chain::Last& Chain::last_for(StreamHandle stream) {
  const std::uint64_t capture = runtime_.capture_of(stream);
  if (capture == 0) return eager_;
  if (capture != capture_) {
    capture_ = capture;
    captured_.any = false;
  }
  return captured_;
}

void Chain::enter(StreamHandle stream) {
  const Last& last = last_for(stream);
  if (last.any && last.stream != stream) runtime_.wait(stream, last.event);
}

void Chain::leave(StreamHandle stream) {
  Last& last = last_for(stream);
  if (last.event == nullptr) last.event = runtime_.make_event();
  runtime_.record(last.event, stream);
  last.any = true;
  last.stream = stream;
}

}  // namespace fccl::cuda
