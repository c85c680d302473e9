#include "cpu/point_to_point.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <system_error>

#include "cpu/environment.h"
#include "cpu/interrupt.h"
#include "cpu/tuning.h"

namespace fccl::cpu {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kTick = std::chrono::milliseconds(1);
constexpr int kQuietTicks = 100;  // without traffic, before the worker sleeps for good

}  // namespace

PointToPoint::PointToPoint(Group::State& state) : state_(state), matcher_(state) {}

PointToPoint::~PointToPoint() {
  if (state_.generation != fork_generation()) {  // the thread is the parent's
    if (worker_.joinable()) new std::thread(std::move(worker_));
    (void)busy_.release();
    return;
  }
  stop(Error(ErrorKind::kAborted, "fccl " + state_.where() + ": the group was freed"));
}

// Lanes are the parent's to write; and its threads may have held the lock when it forked.
void PointToPoint::check_fork(const Request& request) const {
  if (state_.generation == fork_generation()) return;
  throw Error(ErrorKind::kSystem, "fccl " + Matcher::describe(request) + ", " + state_.where() +
                                      ": this process was forked after the group was made, and messages stay "
                                      "with the parent; make a new group in the child");
}

template <typename Step>
void PointToPoint::guarded(Step&& step) {
  try {
    step();
  } catch (const Error& error) {
    matcher_.fail_all(state_.fail(error));
  } catch (const std::exception& error) {  // no memory for the bookkeeping
    matcher_.fail_all(state_.fail(Error(ErrorKind::kSystem, "fccl point-to-point, " + state_.where() +
                                                                ": failed on this rank: " + error.what())));
  }
}

void PointToPoint::post(const RequestPtr& request) {
  check_fork(*request);
  bool rests = false;
  {
    std::unique_lock lock(mutex_);
    state_.throw_if_failed();
    if (stopped_ || state_.left.load()) {
      throw Error(ErrorKind::kAborted, "fccl " + Matcher::describe(*request) + ", " + state_.where() +
                                           ": the group has been destroyed on this rank");
    }
    guarded([&] { matcher_.post(request); });
    end_all(lock);
    if (state_.failed.load()) {  // the request has ended with the error, and whoever waits for it throws
      lock.unlock();
      state_.after_failure();
      return;
    }
    // What ended at once may have left an answer for the peer behind.
    if (!matcher_.is_busy()) return;
    if (!worker_runs_) start_worker();
    rests = worker_rests_.load();
  }
  if (rests) busy_->notify_one();
  if (sleeping_.load() != 0) wake();
}

void PointToPoint::end_all(std::unique_lock<std::mutex>& lock) {
  const std::vector<RequestPtr> ended = matcher_.take_ended();
  if (ended.empty()) return;
  lock.unlock();  // they may post more
  for (const RequestPtr& request : ended) {
    if (request->at_end) request->at_end(*request);
    request->at_end = nullptr;
    request->is_done.store(true);
  }
  // Other threads may wait for these.
  if (sleeping_.load() != 0) wake();
  lock.lock();
}

bool PointToPoint::progress() {
  std::unique_lock lock(mutex_);
  bool moved = false;
  if (state_.failed.load(std::memory_order_acquire)) {
    matcher_.fail_all(*state_.held_failure());
  } else {
    guarded([&] { moved = matcher_.progress(); });
  }
  end_all(lock);
  lock.unlock();
  state_.after_failure();
  return moved;
}

bool PointToPoint::withdraw(const RequestPtr& request) noexcept {
  if (state_.generation != fork_generation()) return false;
  try {
    std::unique_lock lock(mutex_);
    const bool withdrawn = matcher_.withdraw(request);
    end_all(lock);
    return withdrawn;
  } catch (...) {
    return false;
  }
}

// ---- waiting ----

class PointToPoint::Waiting {
 public:
  explicit Waiting(PointToPoint& p2p) : p2p_(p2p) {
    ++p2p_.waiting_;
    ++p2p_.turns_;
    if (p2p_.worker_works_.load()) p2p_.wake();  // so that it makes room
  }
  ~Waiting() {
    ++p2p_.turns_;
    // One of the two stores, this and worker_rests_, is seen by the other side.
    if (--p2p_.waiting_ != 0 || !p2p_.worker_rests_.load()) return;
    const std::lock_guard lock(p2p_.mutex_);
    p2p_.busy_->notify_one();
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  PointToPoint& p2p_;
};

bool PointToPoint::test(Request& request) {
  if (request.done()) return true;
  check_fork(request);
  progress();
  return request.done();
}

void PointToPoint::wait(Request& request, const Deadline& deadline) {
  if (!request.done()) {
    check_fork(request);
    const Waiting waiting(*this);
    const WaitPolicy& policy = state_.waiter->policy(is_background_thread());
    unsigned spins = 0;
    Clock::time_point quiet_since = Clock::now();
    Clock::time_point next_look = quiet_since + kParkSlice;
    while (!request.done()) {
      const bool moved = progress();
      if (request.done()) break;
      const Clock::time_point now = Clock::now();
      if (now >= next_look || deadline.expired()) {
        next_look = now + kParkSlice;
        check_interrupt();
        look_around();
        if (deadline.expired() && !test(request)) throw timed_out(request, deadline);
      }
      if (moved) {
        quiet_since = now;
      } else if (now - quiet_since < policy.spin) {
        spin(spins += 4);  // a turn of progress takes longer than one of a loop
      } else if (now - quiet_since < policy.spin + policy.yield) {
        ::sched_yield();
      } else {
        const auto limit = std::min<std::chrono::nanoseconds>(kParkSlice, deadline.left(kParkSlice));
        sleep_until_news(limit, &request);
      }
    }
  }
  if (request.error) throw Error(*request.error);
}

// Keeps the peers told that this thread sleeps.
class PointToPoint::Sleeping {
 public:
  explicit Sleeping(PointToPoint& p2p) : p2p_(p2p) {
    const std::lock_guard lock(p2p_.mutex_);
    lanes_.reserve(static_cast<std::size_t>(p2p_.state_.world_size()));
    ++p2p_.sleeping_;
    for (int peer = 0; peer < p2p_.state_.world_size(); ++peer) {
      if (peer == p2p_.state_.rank()) continue;
      if (!p2p_.matcher_.is_busy_with(peer) && !p2p_.matcher_.receives_from_any()) continue;
      lanes_.push_back(&p2p_.matcher_.lane(peer));
      lanes_.back()->sleep();  // W1 in wait.h
    }
  }
  ~Sleeping() {
    --p2p_.sleeping_;
    const std::lock_guard lock(p2p_.mutex_);
    for (Lane* lane : lanes_) lane->wake();
  }
  Sleeping(const Sleeping&) = delete;
  Sleeping& operator=(const Sleeping&) = delete;
  const std::vector<Lane*>& lanes() const { return lanes_; }

 private:
  PointToPoint& p2p_;
  std::vector<Lane*> lanes_;
};

void PointToPoint::sleep_until_news(std::chrono::nanoseconds limit, const Request* request) {
  std::vector<BellWatch> watched{watch(own_bell_)};
  const Sleeping sleeping(*this);
  watched.reserve(1 + sleeping.lanes().size());
  watched[0] = watch(own_bell_);  // what comes from now on counts
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const Lane* lane : sleeping.lanes()) watched.push_back(watch(lane->bell()));
  const bool news = progress() || (request != nullptr && request->done());  // W2
  if (!news) wait_for_any(watched, limit);
}

void PointToPoint::wake() noexcept {
  own_bell_.fetch_add(1);
  wake_own(own_bell_);
}

std::optional<Error> PointToPoint::trouble_with(int peer) const {
  // Whether it is there first: one that leaves in between has left, and not died.
  const bool gone = state_.node->is_gone(state_.members[static_cast<std::size_t>(peer)]);
  const auto state = static_cast<RankState>(
      state_.controls[static_cast<std::size_t>(peer)]->status.state.load(std::memory_order_acquire));
  const std::string who = "rank " + std::to_string(peer);
  const std::string where = "fccl point-to-point, " + state_.where() + ": ";
  if (state == RankState::kFailed) {
    return Error(ErrorKind::kPeerFailed,
                 where + "the group has failed on " + who + ", which says: " + state_.text_of(peer));
  }
  if (state == RankState::kLeft)
    return Error(ErrorKind::kPeerLeft, where + who + " has left the group: " + state_.text_of(peer));
  if (gone) {
    return Error(
        ErrorKind::kPeerDied,
        where + "the process of " + who +
            " ended without destroy_process_group() while there was something to send or to receive; "
            "that rank's output says why");
  }
  return std::nullopt;
}

// A reason counts only if what is awaited has not come by the time it is known: the progress between.
void PointToPoint::look_around() {
  std::vector<std::pair<int, Error>> troubles;
  for (int peer = 0; peer < state_.world_size(); ++peer) {
    if (peer == state_.rank()) continue;
    if (auto trouble = trouble_with(peer)) troubles.emplace_back(peer, std::move(*trouble));
  }
  if (troubles.empty()) return;
  while (progress()) {
  }
  std::unique_lock lock(mutex_);
  const bool alone = static_cast<int>(troubles.size()) == state_.world_size() - 1;
  for (const auto& [peer, trouble] : troubles) {
    // A message from any rank may still come from those that have not left.
    const bool any = matcher_.receives_from_any() && (alone || trouble.kind() != ErrorKind::kPeerLeft);
    if (!any && !matcher_.has_requests_with(peer)) {
      matcher_.forget_answers(peer);  // nobody is there to hear them
      continue;
    }
    std::string text = trouble.what();
    if (const std::string waiting = matcher_.describe_requests_with(peer); !waiting.empty())
      text += ". It is needed here for " + waiting;
    if (const std::string unmatched = matcher_.describe_unmatched(); !unmatched.empty())
      text += "; what has come and waits for a receive: " + unmatched;
    matcher_.fail_all(state_.fail(Error(trouble.kind(), text)));
    break;
  }
  end_all(lock);
  lock.unlock();
  state_.after_failure();
}

Error PointToPoint::timed_out(const Request& request, const Deadline& deadline) {
  const std::lock_guard lock(mutex_);
  std::string text = "fccl " + Matcher::describe(request) + ", " + state_.where() + ": " +
                     (matcher_.is_unmatched(request) ? "no message has come within " : "not done after ") +
                     std::to_string(deadline.span().count()) + " ms; the group stays usable";
  if (const std::string unmatched = matcher_.describe_unmatched(); !request.sends && !unmatched.empty())
    text += "; what has come and waits for a receive: " + unmatched;
  return Error(ErrorKind::kTimeout, text);
}

// ---- the worker ----

void PointToPoint::start_worker() {
  // The program's own threads get its signals.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    worker_ = std::thread([this] { work(); });
    worker_runs_ = true;
  } catch (const std::system_error&) {
    // No thread to be had: requests go on while somebody waits for one.
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void PointToPoint::work() {
  set_background_thread(true);
  ::pthread_setname_np(::pthread_self(), "fccl_messages");
  try {
    work_until_stopped();
  } catch (const std::exception& error) {  // no memory, say: those that wait will see
    state_.fail(Error(ErrorKind::kSystem,
                      "fccl point-to-point, " + state_.where() + ": failed on this rank: " + error.what()));
    state_.after_failure();
  }
}

void PointToPoint::work_until_stopped() {
  int quiet = 0;
  std::uint64_t turns = 0;
  Clock::time_point next_look = Clock::now() + kParkSlice;
  while (!stopping_.load()) {
    bool idle = false;
    {
      std::unique_lock lock(mutex_);
      idle = !matcher_.is_busy() || waiting_.load() != 0 || turns != turns_.load();
      turns = turns_.load();
      worker_works_.store(!idle);
      if (idle) {
        if (quiet < kQuietTicks) {
          ++quiet;
          busy_->wait_for(lock, kTick);
        } else {
          worker_rests_.store(true);
          busy_->wait(lock, [&] { return stopping_.load() || (matcher_.is_busy() && waiting_.load() == 0); });
          worker_rests_.store(false);
          quiet = 0;
        }
        continue;
      }
    }
    quiet = 0;
    if (!progress()) sleep_until_news(kParkSlice, nullptr);
    if (const Clock::time_point now = Clock::now(); now >= next_look) {
      next_look = now + kParkSlice;
      look_around();
    }
  }
}

void PointToPoint::drain(std::chrono::milliseconds grace) noexcept {
  try {
    const Deadline end = Deadline::after(grace);
    while (!state_.failed.load() && !end.expired()) {
      {
        const std::lock_guard lock(mutex_);
        if (!matcher_.has_something_to_say()) return;
      }
      if (!progress()) sleep_until_news(std::chrono::milliseconds(10), nullptr);
      look_around();
    }
  } catch (...) {
    // No memory: no more grace.
  }
}

void PointToPoint::stop(const Error& why) noexcept {
  try {
    {
      std::unique_lock lock(mutex_);
      stopped_ = true;
      const auto failure = state_.held_failure();
      matcher_.fail_all(failure ? *failure : why);
      end_all(lock);
      stopping_.store(true);
    }
    busy_->notify_all();
    wake();
    if (!worker_.joinable()) return;
    // A tensor that is freed with its message may be the last thing that held the group.
    if (worker_.get_id() == std::this_thread::get_id()) {
      worker_.detach();
    } else {
      worker_.join();
    }
  } catch (...) {
    // No lock to be had: the thread is left to itself.
  }
}

}  // namespace fccl::cpu
