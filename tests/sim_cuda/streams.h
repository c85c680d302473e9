// Streams and events. A stream is a thread that carries out what is put on it, in order; an event is a mark
// that such a thread sets.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>

#include "capture.h"
#include "simulation.h"

namespace fccl::sim {

using Work = std::function<void()>;

// A moment on a stream.
class Mark {
 public:
  void set();
  void wait();
  bool is_set();
  double milliseconds();  // when it was set

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  double at_ = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

class Stream {
 public:
  explicit Stream(int device) : device_(device) {}

  int device() const { return device_; }
  // Puts work on it, or into the graph that it is being captured into.
  cudaError_t put(Work work);
  // Past any capture.
  void run_later(Work work);
  // A mark that is set when all that has been put on it is done.
  MarkPtr mark();
  bool is_idle();

  // With graphs_mutex() held.
  std::shared_ptr<Capture> capture;  // that it is part of
  unsigned lane = 0;                 // its part

 private:
  void serve();

  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool busy_ = false;
  bool started_ = false;
};

struct Event {
  // With graphs_mutex() held.
  MarkPtr last;                      // null: never recorded
  std::shared_ptr<Capture> capture;  // that it was last recorded in, if it was
  CapturedMark captured;
};

// Null if there is no such stream; the null handle is the current device's legacy stream.
Stream* find_stream(cudaStream_t handle);
// Waits until all streams of this process have done what they were given.
void wait_for_all_streams();

// Lets some time pass, or none.
void delay(std::mt19937_64& random);
std::mt19937_64 make_random();

}  // namespace fccl::sim
