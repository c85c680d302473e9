#include "streams.h"

#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

namespace fccl::sim {
namespace {

double now_milliseconds() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Nothing is ever taken out: a handle that is used too late is found to be no stream any more, and a process
// may end while its streams work.
struct Registry {
  std::mutex mutex;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::vector<Stream*> legacy;
};
Registry& registry() {
  static auto* registry = new Registry();
  return *registry;
}

bool is_event(Event* event) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.events.count(event) != 0;
}

}  // namespace

// ---- marks ----

void Mark::set() {
  const std::lock_guard lock(mutex_);
  set_ = true;
  at_ = now_milliseconds();
  changed_.notify_all();
}
void Mark::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return set_; });
}
bool Mark::is_set() {
  const std::lock_guard lock(mutex_);
  return set_;
}
double Mark::milliseconds() {
  const std::lock_guard lock(mutex_);
  return at_;
}

// ---- delays ----

std::mt19937_64 make_random() {
  static std::atomic<std::uint64_t> next{0};
  const auto seed = static_cast<std::uint64_t>(setting("FCCL_SIM_SEED", 1));
  const auto process = static_cast<std::uint64_t>(setting("FCCL_SIM_FIRST_UUID", 0));
  return std::mt19937_64(seed * 1'000'003 + process * 1009 + next++);
}

void delay(std::mt19937_64& random) {
  static const bool wanted = setting("FCCL_SIM_SEED", 1) != 0;
  if (!wanted) return;
  const auto dice = random() % 16;
  if (dice < 8) return;
  const auto microseconds = dice == 15 ? 2000 + random() % 8000 : random() % 400;
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

// ---- streams ----

cudaError_t Stream::put(Work work) {
  {
    const std::lock_guard lock(graphs_mutex());
    if (capture != nullptr) {
      if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
      capture->add({GraphNode::Kind::kWork, lane, std::move(work), 0});
      return cudaSuccess;
    }
  }
  run_later(std::move(work));
  return cudaSuccess;
}

void Stream::run_later(Work work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  if (!started_) {
    started_ = true;
    std::thread([this] { serve(); }).detach();
  }
  changed_.notify_all();
}

void Stream::serve() {
  std::mt19937_64 random = make_random();
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty(); });
    const Work work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    delay(random);
    if (!is_broken()) work();
    lock.lock();
    busy_ = false;
  }
}

MarkPtr Stream::mark() {
  auto mark = std::make_shared<Mark>();
  if (is_idle()) {
    mark->set();
  } else {
    run_later([mark] { mark->set(); });
  }
  return mark;
}

bool Stream::is_idle() {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !busy_;
}

Stream* find_stream(cudaStream_t handle) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (handle == nullptr || handle == cudaStreamLegacy) {
    const auto device = static_cast<std::size_t>(current_device());
    while (all.legacy.size() <= device) all.legacy.push_back(new Stream(static_cast<int>(all.legacy.size())));
    return all.legacy[device];
  }
  auto* const stream = reinterpret_cast<Stream*>(handle);
  return all.streams.count(stream) != 0 ? stream : nullptr;
}

void wait_for_all_streams() {
  std::vector<MarkPtr> marks;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    for (Stream* stream : all.streams) marks.push_back(stream->mark());
    for (Stream* stream : all.legacy) marks.push_back(stream->mark());
  }
  for (const MarkPtr& mark : marks) {
    while (!mark->is_set() && !is_broken()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace fccl::sim

using namespace fccl::sim;

// ---- the runtime's functions ----

namespace {

cudaError_t make_stream(cudaStream_t* to, unsigned flags) {
  if (const auto error = trouble("cudaStreamCreate")) return told(error);
  // The other kind waits for the legacy stream, and that for it.
  if ((flags & cudaStreamNonBlocking) == 0)
    return told(not_simulated("a stream that is not cudaStreamNonBlocking"));
  use_device();
  auto* const stream = new Stream(current_device());
  *to = reinterpret_cast<cudaStream_t>(stream);
  const std::lock_guard lock(registry().mutex);
  registry().streams.insert(stream);
  return cudaSuccess;
}

// A broken device sets no marks any more.
cudaError_t wait_for(const MarkPtr& mark) {
  while (!mark->is_set()) {
    if (is_broken()) return told(cudaErrorLaunchFailure);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return is_broken() ? told(cudaErrorLaunchFailure) : cudaSuccess;
}

}  // namespace

FCCL_SIM_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* to, unsigned flags) {
  return make_stream(to, flags);
}
FCCL_SIM_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* to, unsigned flags, int) {
  return make_stream(to, flags);
}
FCCL_SIM_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const std::lock_guard lock(registry().mutex);
  // What was put on it is still done.
  return registry().streams.erase(reinterpret_cast<Stream*>(handle)) != 0
             ? cudaSuccess
             : told(cudaErrorInvalidResourceHandle);
}
FCCL_SIM_EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (const auto error = trouble("cudaStreamSynchronize")) return told(error);
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return told(cudaErrorInvalidResourceHandle);
  {
    const std::lock_guard lock(graphs_mutex());
    if (stream->capture != nullptr) {
      stream->capture->invalid = true;
      return told(cudaErrorStreamCaptureUnsupported);
    }
  }
  return wait_for(stream->mark());
}
FCCL_SIM_EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  if (const auto error = trouble("cudaStreamQuery")) return told(error);
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return told(cudaErrorInvalidResourceHandle);
  return stream->is_idle() ? cudaSuccess : told(cudaErrorNotReady);
}
FCCL_SIM_EXPORT cudaError_t cudaDeviceSynchronize() {
  if (const auto error = trouble("cudaDeviceSynchronize")) return told(error);
  if (const auto error = forbidden_in_capture("cudaDeviceSynchronize")) return told(error);
  if (!is_broken()) wait_for_all_streams();
  return is_broken() ? told(cudaErrorLaunchFailure) : cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return told(cudaErrorInvalidResourceHandle);
  return told(stream->put([function, data] { function(data); }));
}

FCCL_SIM_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* to, unsigned) {
  if (const auto error = trouble("cudaEventCreate")) return told(error);
  use_device();
  auto* const event = new Event();
  *to = reinterpret_cast<cudaEvent_t>(event);
  const std::lock_guard lock(registry().mutex);
  registry().events.insert(event);
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaEventCreate(cudaEvent_t* to) { return cudaEventCreateWithFlags(to, 0); }
FCCL_SIM_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const std::lock_guard lock(registry().mutex);
  auto* const event = reinterpret_cast<Event*>(handle);
  if (registry().events.erase(event) == 0) return told(cudaErrorInvalidResourceHandle);
  delete event;  // who waits for it has its mark
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  if (const auto error = trouble("cudaEventRecord")) return told(error);
  auto* const event = reinterpret_cast<Event*>(handle);
  Stream* const stream = find_stream(on);
  if (stream == nullptr || !is_event(event)) return told(cudaErrorInvalidResourceHandle);
  note("record event %p on stream %p", static_cast<void*>(handle), static_cast<void*>(on));
  const std::lock_guard lock(graphs_mutex());
  event->capture = stream->capture;
  if (stream->capture != nullptr) {
    if (stream->capture->invalid) return told(cudaErrorStreamCaptureInvalidated);
    event->captured = stream->capture->record(stream->lane);
  } else {
    event->last = stream->mark();
  }
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  return cudaEventRecord(handle, on);
}
FCCL_SIM_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t on, cudaEvent_t handle, unsigned) {
  if (const auto error = trouble("cudaStreamWaitEvent")) return told(error);
  auto* const event = reinterpret_cast<Event*>(handle);
  Stream* const stream = find_stream(on);
  if (stream == nullptr || !is_event(event)) return told(cudaErrorInvalidResourceHandle);
  note("stream %p waits for event %p", static_cast<void*>(on), static_cast<void*>(handle));
  const std::lock_guard lock(graphs_mutex());
  if (event->capture != nullptr) {
    Capture& capture = *event->capture;
    if (capture.streams.empty()) return told(cudaErrorCapturedEvent);  // it has ended
    if (stream->capture == nullptr) {
      stream->capture = event->capture;
      stream->lane = capture.add_lane(stream);
    } else if (stream->capture != event->capture) {
      return told(cudaErrorStreamCaptureMerge);
    }
    if (capture.invalid) return told(cudaErrorStreamCaptureInvalidated);
    capture.wait_for(stream->lane, event->captured);
    return cudaSuccess;
  }
  if (stream->capture != nullptr) {
    stream->capture->invalid = true;
    return told(cudaErrorStreamCaptureIsolation);
  }
  if (event->last != nullptr && !event->last->is_set())
    stream->run_later([mark = event->last] { mark->wait(); });
  return cudaSuccess;
}
FCCL_SIM_EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
  if (const auto error = trouble("cudaEventQuery")) return told(error);
  auto* const event = reinterpret_cast<Event*>(handle);
  if (!is_event(event)) return told(cudaErrorInvalidResourceHandle);
  if (const auto error = forbidden_in_capture("cudaEventQuery")) return told(error);
  const std::lock_guard lock(graphs_mutex());
  if (event->capture != nullptr) return told(cudaErrorCapturedEvent);
  return event->last == nullptr || event->last->is_set() ? cudaSuccess : told(cudaErrorNotReady);
}
FCCL_SIM_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  if (const auto error = trouble("cudaEventSynchronize")) return told(error);
  auto* const event = reinterpret_cast<Event*>(handle);
  if (!is_event(event)) return told(cudaErrorInvalidResourceHandle);
  if (const auto error = forbidden_in_capture("cudaEventSynchronize")) return told(error);
  MarkPtr mark;
  {
    const std::lock_guard lock(graphs_mutex());
    if (event->capture != nullptr) return told(cudaErrorCapturedEvent);
    mark = event->last;
  }
  return mark == nullptr ? cudaSuccess : wait_for(mark);
}
FCCL_SIM_EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  auto* const from = reinterpret_cast<Event*>(start);
  auto* const to = reinterpret_cast<Event*>(end);
  if (!is_event(from) || !is_event(to)) return told(cudaErrorInvalidResourceHandle);
  const std::lock_guard lock(graphs_mutex());
  if (from->last == nullptr || to->last == nullptr) return told(cudaErrorInvalidResourceHandle);
  if (!from->last->is_set() || !to->last->is_set()) return told(cudaErrorNotReady);
  *milliseconds = static_cast<float>(to->last->milliseconds() - from->last->milliseconds());
  return cudaSuccess;
}
