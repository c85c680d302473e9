// send and receive between real processes: values, order, tags, any source, beside collectives, with late
// peers, misfits, deaths, and made-up records.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu/arena.h"
#include "cpu/group.h"
#include "cpu/lane.h"
#include "cpu/point_to_point.h"
#include "cpu/tuning.h"
#include "ranks.h"

namespace fccl::cpu {
namespace {

using std::chrono::milliseconds;
using test::expect_ranks;
using test::require;
using test::run_ranks;

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

// Memory of `count` numbers on the heap or in the arena, with a guard behind it.
class Numbers {
 public:
  Numbers(std::size_t count, bool in_arena) : count_(count) {
    if (in_arena) block_ = Arena::of_process()->allocate((count + 1) * 4, "test");
    heap_.assign(in_arena ? 0 : count + 1, -1);
    data_ = in_arena ? reinterpret_cast<std::int32_t*>(block_) : heap_.data();
    fill(-1);
    data_[count] = 77;
  }
  ~Numbers() {
    if (block_ != nullptr) Arena::of_process()->free(block_);
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  void fill(std::int32_t seed) {
    for (std::size_t i = 0; i < count_; ++i) data_[i] = seed + static_cast<std::int32_t>(i % 65537);
  }
  void expect(std::int32_t seed, const std::string& what) const {
    for (std::size_t i = 0; i < count_; ++i) {
      if (data_[i] != seed + static_cast<std::int32_t>(i % 65537))
        throw std::runtime_error(what + ": element " + std::to_string(i) + " is " + std::to_string(data_[i]));
    }
    require(data_[count_] == 77, what + ": written beyond the end");
  }
  std::int32_t* data() const { return data_; }
  std::size_t size() const { return count_; }

 private:
  std::size_t count_;
  std::vector<std::int32_t> heap_;
  std::byte* block_ = nullptr;
  std::int32_t* data_ = nullptr;
};

RequestPtr post(Group& group, bool sends, const Numbers& numbers, int peer, int tag,
                DType dtype = DType::kInt32) {
  const auto request = std::make_shared<Request>();
  request->sends = sends;
  request->data = reinterpret_cast<std::byte*>(numbers.data());
  request->count = numbers.size();
  request->dtype = dtype;
  request->peer = peer;
  request->tag = tag;
  group.point_to_point().post(request);
  return request;
}
RequestPtr send(Group& group, const Numbers& numbers, int peer, int tag = 0) {
  return post(group, true, numbers, peer, tag);
}
RequestPtr receive(Group& group, const Numbers& numbers, int peer, int tag = 0) {
  return post(group, false, numbers, peer, tag);
}
void wait(Group& group, const RequestPtr& request) { group.point_to_point().wait(*request, soon()); }

// What an error's text must contain.
void expect_error(const std::function<void()>& call, ErrorKind kind, const std::string& text) {
  try {
    call();
  } catch (const Error& error) {
    require(error.kind() == kind && std::string(error.what()).find(text) != std::string::npos, error.what());
    return;
  }
  throw std::runtime_error("no error, expected " + text);
}

// Around the borders of the ways in which a message travels, in elements.
const std::vector<std::size_t> kSizes = {0,
                                         1,
                                         15,
                                         17,
                                         kEagerBytes / 4,
                                         kEagerBytes / 4 + 1,
                                         kLaneChunkBytes / 4,
                                         kLaneChunkBytes / 4 + 1,
                                         kLaneChunkBytes * kLaneChunks / 4 + 5,
                                         kPullBytes / 4 + 1,
                                         kPullBytes / 2 + 3};

class PointToPointRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PointToPointRanks, testing::Values(2, 3, 5));

TEST_P(PointToPointRanks, AroundTheRingInEverySize) {
  expect_ranks(GetParam(), [](Group& group) {
    const int ranks = group.world_size();
    const int next = (group.rank() + 1) % ranks;
    const int previous = (group.rank() + ranks - 1) % ranks;
    int round = 0;
    for (const std::size_t size : kSizes) {
      for (const bool in_arena : {false, true}) {
        for (const bool receive_first : {false, true}) {
          const Numbers out(size, in_arena);
          const Numbers in(size, false);
          const_cast<Numbers&>(out).fill(group.rank() * 1000 + ++round);
          const std::uint64_t before = group.zero_copy_count();
          RequestPtr sent;
          RequestPtr received;
          if (receive_first) received = receive(group, in, previous);
          sent = send(group, out, next);
          if (!receive_first) received = receive(group, in, previous);
          wait(group, received);
          wait(group, sent);
          in.expect(previous * 1000 + round, "received");
          require(received->peer == previous, "from the wrong rank");
          const bool placed = in_arena && size * 4 > kEagerBytes;
          require(group.zero_copy_count() == before + (placed ? 2 : 0), "the wrong path");
        }
      }
    }
  });
}

TEST(PointToPoint, MessagesAreMatchedByTag) {
  expect_ranks(2, [](Group& group) {
    for (const std::size_t size : {std::size_t{100}, std::size_t{200000}}) {
      std::vector<std::unique_ptr<Numbers>> numbers;
      std::vector<RequestPtr> requests;
      const std::vector<int> sent = {3, 1, 1, 2};
      const std::vector<int> asked = {1, 2, 1, 3};
      for (std::size_t i = 0; i < sent.size(); ++i) {
        numbers.push_back(std::make_unique<Numbers>(size, i % 2 == 1));
        if (group.rank() == 0) {
          numbers[i]->fill(static_cast<std::int32_t>(10 * i));
          requests.push_back(send(group, *numbers[i], 1, sent[i]));
        } else {
          requests.push_back(receive(group, *numbers[i], 0, asked[i]));
        }
      }
      for (const RequestPtr& request : requests) wait(group, request);
      if (group.rank() == 0) continue;
      // Of equal tags the first sent is the first received.
      for (const auto& [place, message] : {std::pair{0, 1}, {1, 3}, {2, 2}, {3, 0}})
        numbers[static_cast<std::size_t>(place)]->expect(10 * message, "tag");
    }
  });
}

TEST(PointToPoint, FromAnyRank) {
  expect_ranks(4, [](Group& group) {
    constexpr int kEach = 6;
    if (group.rank() != 0) {
      for (int i = 0; i < kEach; ++i) {
        Numbers numbers(i % 2 == 0 ? 20 : 50000, i % 3 == 0);
        numbers.fill(group.rank() * 100 + i);
        wait(group, send(group, numbers, 0, i));
      }
      return;
    }
    for (int i = 0; i < kEach; ++i) {
      std::vector<int> seen(4, 0);
      for (int from = 1; from < 4; ++from) {
        const Numbers numbers(i % 2 == 0 ? 20 : 50000, false);
        const RequestPtr request = receive(group, numbers, -1, i);
        wait(group, request);
        numbers.expect(request->peer * 100 + i, "from any rank");
        ++seen[static_cast<std::size_t>(request->peer)];
      }
      require(seen == std::vector<int>({0, 1, 1, 1}), "a rank twice");
    }
  });
}

// All ranks draw the same plan of messages between all of them; each makes its part, in an order of its own,
// with collectives between, and waits at the end.
void traffic(Group& group) {
  std::uint64_t random = 7;
  const auto draw = [&random](std::uint64_t below) {
    random = random * 6364136223846793005ULL + 1442695040888963407ULL;
    return (random >> 33) % below;
  };
  const auto ranks = static_cast<std::uint64_t>(group.world_size());
  for (int round = 0; round < 12; ++round) {
    std::vector<std::unique_ptr<Numbers>> numbers;
    std::vector<std::pair<RequestPtr, std::int32_t>> received;
    std::vector<RequestPtr> sent;
    std::vector<std::function<void()>> later;
    for (int message = 0; message < 40; ++message) {
      const int from = static_cast<int>(draw(ranks));
      const int to = static_cast<int>((static_cast<std::uint64_t>(from) + 1 + draw(ranks - 1)) % ranks);
      const std::size_t size = draw(3) == 0 ? draw(300000) : draw(3000);
      const int tag = static_cast<int>(draw(3));
      const bool in_arena = draw(2) == 0;
      const bool put_off = draw(4) == 0;
      const std::int32_t seed = round * 100 + message;
      if (group.rank() == from) {
        numbers.push_back(std::make_unique<Numbers>(size, in_arena));
        numbers.back()->fill(seed);
        sent.push_back(send(group, *numbers.back(), to, tag * 64 + message));
      } else if (group.rank() == to) {
        const auto ask = [&, from, size, tag, message, seed] {
          numbers.push_back(std::make_unique<Numbers>(size, false));
          received.emplace_back(
              receive(group, *numbers.back(), message % 5 == 0 ? -1 : from, tag * 64 + message), seed);
        };
        if (put_off) {
          later.emplace_back(ask);
        } else {
          ask();
        }
      }
      if (message % 13 == 0) {
        float one = 1;
        group.all_reduce(&one, &one, 1, DType::kFloat32, ReduceOp::kSum, soon());
        require(one == static_cast<float>(ranks), "all_reduce between messages");
      }
    }
    for (const auto& ask : later) ask();
    for (const auto& [request, seed] : received) {
      wait(group, request);
      const auto* first = reinterpret_cast<const std::int32_t*>(request->data);
      for (std::size_t i = 0; i < request->count; ++i)
        require(first[i] == seed + static_cast<std::int32_t>(i % 65537), "a wrong element");
    }
    for (const RequestPtr& request : sent) wait(group, request);
  }
}

GroupTesting late(int often) {
  GroupTesting testing;
  // Called by the thread that waits and by the worker.
  testing.pause = [calls = std::make_shared<std::atomic<int>>(0), often] {
    if (++*calls % often == 0) std::this_thread::sleep_for(milliseconds(1));
  };
  return testing;
}

bool all_well(const std::vector<test::RankResult>& results) {
  bool well = true;
  for (const auto& result : results) {
    well = well && result.exit_code == 0 && result.signal == 0;
  }
  return well;
}

TEST(PointToPoint, AnyTrafficComesThrough) { expect_ranks(4, traffic, 120); }

TEST(PointToPoint, AnyTrafficComesThroughWithLateRanks) {
  EXPECT_TRUE(all_well(run_ranks(3, traffic, 120, true, late(20))));
}

void one_long_message(Group& group) {
  Numbers numbers(2000000, false);
  if (group.rank() == 0) numbers.fill(5);
  wait(group, group.rank() == 0 ? send(group, numbers, 1) : receive(group, numbers, 0));
  if (group.rank() == 1) numbers.expect(5, "a long message");
}

TEST(PointToPoint, ALongMessageComesThroughToALateRank) {
  EXPECT_TRUE(all_well(run_ranks(2, one_long_message, 60, true, late(3))));
}

TEST(PointToPoint, WithoutWaitingForEmptySlotsItDoesNot) {
  GroupTesting wrong = late(3);
  wrong.hasty = true;
  EXPECT_FALSE(all_well(run_ranks(2, one_long_message, 60, true, wrong))) << "the test above has no power";
}

TEST(PointToPoint, GoesOnWhileNobodyWaits) {
  expect_ranks(2, [](Group& group) {
    Numbers numbers(1000000, false);
    if (group.rank() == 0) {
      numbers.fill(3);
      const RequestPtr request = send(group, numbers, 1);
      // Busy with something else until the peer has it.
      Numbers reply(1, false);
      const RequestPtr answer = receive(group, reply, 1);
      for (int i = 0; i < 3000 && !answer->done(); ++i) std::this_thread::sleep_for(milliseconds(1));
      require(answer->done() && request->done(), "nothing moved without a waiting thread");
    } else {
      std::this_thread::sleep_for(milliseconds(300));  // its worker rests by now
      wait(group, receive(group, numbers, 0));
      numbers.expect(3, "received");
      wait(group, send(group, Numbers(1, false), 0));
    }
  });
}

TEST(PointToPoint, AWaitThatIsTooShortLosesNothing) {
  expect_ranks(2, [](Group& group) {
    Numbers numbers(70000, false);
    if (group.rank() == 0) {
      wait(group, send(group, Numbers(3, false), 1, 8));
      std::this_thread::sleep_for(milliseconds(300));
      numbers.fill(2);
      wait(group, send(group, numbers, 1, 5));
    } else {
      const RequestPtr request = receive(group, numbers, 0, 5);
      expect_error(
          [&] { group.point_to_point().wait(*request, Deadline::after(milliseconds(100))); },
          ErrorKind::kTimeout,
          "recv(int32, count=70000, tag=5) from rank 0, group 'test', rank 1 of 2: no message has come "
          "within 100 ms; the group stays usable; what has come and waits for a receive: rank 0 has sent tag "
          "8");
      wait(group, request);
      numbers.expect(2, "received");
      wait(group, receive(group, Numbers(3, false), 0, 8));
    }
  });
}

TEST(PointToPoint, MisfitsAreErrorsAndTheGroupGoesOn) {
  expect_ranks(2, [](Group& group) {
    for (const std::size_t size : {10U, 50000U}) {
      for (const bool in_arena : {false, true}) {
        const Numbers numbers(size, in_arena);
        const Numbers less(size - 1, false);
        const std::string text = std::to_string(size) + " elements of int32. The message was not delivered";
        if (group.rank() == 0) {
          for (int i = 0; i < 2; ++i) {
            const RequestPtr request = send(group, numbers, 1, i);
            if (size * 4 <= kEagerBytes) {
              wait(group, request);
            } else {
              expect_error([&] { wait(group, request); }, ErrorKind::kMismatch,
                           i == 0 ? std::to_string(size - 1) + " elements of int32"
                                  : std::to_string(size) + " elements of float32");
            }
          }
        } else {
          expect_error([&] { wait(group, receive(group, less, 0, 0)); }, ErrorKind::kMismatch, text);
          less.expect(-1, "changed by a message that was not delivered");
          const RequestPtr other = post(group, false, numbers, 0, 1, DType::kFloat32);
          expect_error([&] { wait(group, other); }, ErrorKind::kMismatch, text);
        }
        Numbers good(size, in_arena);
        if (group.rank() == 0) good.fill(9);
        wait(group, group.rank() == 0 ? send(group, good, 1) : receive(group, good, 0));
        good.expect(9, "after misfits");
      }
    }
    float one = 1;
    group.all_reduce(&one, &one, 1, DType::kFloat32, ReduceOp::kSum, soon());
  });
}

// ---- ranks that go ----

TEST(PointToPoint, ADeadPeerIsNamed) {
  for (const bool any : {false, true}) {
    const auto results = run_ranks(3, [any](Group& group) {
      const Numbers numbers(50000, false);
      if (group.rank() == 1) {
        std::this_thread::sleep_for(milliseconds(100));
        ::kill(::getpid(), SIGKILL);
      }
      // Rank 2 sends to it, rank 0 receives.
      const RequestPtr request =
          group.rank() == 2 ? send(group, numbers, 1) : receive(group, numbers, any ? -1 : 1);
      try {
        wait(group, request);
      } catch (const Error& error) {
        require(std::string(error.what()).find("process of rank 1 ended") != std::string::npos, error.what());
        return;
      }
      throw std::runtime_error("no error");
    });
    EXPECT_EQ(results[1].signal, SIGKILL);
    for (const int rank : {0, 2})
      EXPECT_EQ(results[static_cast<std::size_t>(rank)].exit_code, 0)
          << results[static_cast<std::size_t>(rank)].message;
  }
}

TEST(PointToPoint, WhatWasSentBeforeLeavingArrives) {
  expect_ranks(2, [](Group& group) {
    Numbers small(100, false);
    Numbers large(300000, false);
    if (group.rank() == 0) {
      small.fill(1);
      large.fill(2);
      send(group, small, 1, 1);
      send(group, large, 1, 2);  // nobody waits: leaving lets it finish
      group.leave("done");
      return;
    }
    std::this_thread::sleep_for(milliseconds(200));
    const RequestPtr more = receive(group, Numbers(1, false), 0, 3);
    wait(group, receive(group, large, 0, 2));
    large.expect(2, "the large one");
    wait(group, receive(group, small, 0, 1));
    small.expect(1, "the small one");
    expect_error([&] { wait(group, more); }, ErrorKind::kPeerLeft, "rank 0 has left the group: done");
  });
}

// Leaving gives a sender its memory back, and it may write there at once: a peer that fetches the message
// later must not take what it finds for the message.
TEST(PointToPoint, WhatIsTakenBackByLeavingIsNotReceived) {
  GroupTesting testing;
  testing.send_grace = milliseconds(300);
  const auto body = [](Group& group) {
    Numbers numbers(300000, true);
    if (group.rank() == 0) {
      numbers.fill(1);
      const RequestPtr request = send(group, numbers, 1);
      request->at_end = [&](const Request&) {
        numbers.fill(9);
        std::this_thread::sleep_for(milliseconds(700));
      };
      group.leave("done");  // after the grace
      return;
    }
    std::this_thread::sleep_for(milliseconds(700));
    Numbers received(300000, false);
    expect_error([&] { wait(group, receive(group, received, 0)); }, ErrorKind::kPeerLeft, "rank 0 has left");
  };
  for (const auto& result : run_ranks(2, body, 60, true, testing))
    EXPECT_EQ(result.exit_code, 0) << result.message;
}

// From the send to a receiver that has gone to sleep and wakes up, in milliseconds: the median of several. A
// ring that is lost is made good at the end of a slice (kParkSlice), so only time can tell.
double time_to_wake(Group& group) {
  std::vector<double> times;
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  for (int round = 0; round < 7; ++round) {
    Numbers numbers(2, false);
    group.barrier(soon());
    if (group.rank() == 0) {
      std::this_thread::sleep_for(milliseconds(20));
      const std::int64_t sent = now();
      std::memcpy(numbers.data(), &sent, sizeof(sent));
      wait(group, send(group, numbers, 1));
    } else {
      wait(group, receive(group, numbers, 0));
      std::int64_t sent = 0;
      std::memcpy(&sent, numbers.data(), sizeof(sent));
      times.push_back(static_cast<double>(now() - sent) / 1e6);
    }
  }
  group.barrier(soon());
  if (times.empty()) return -1;
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Without it a receiver that sleeps looks every millisecond, and bells are not needed.
bool has_futex_waitv() { return ::syscall(449, nullptr, 0, 0, nullptr, 0) == -1 && errno == EINVAL; }

TEST(PointToPoint, ASendWakesAReceiverThatSleeps) {
  if (!has_futex_waitv()) GTEST_SKIP() << "Linux before 5.16";
  expect_ranks(2, [](Group& group) {
    const double ms = time_to_wake(group);
    require(ms < 15, "it took " + std::to_string(ms) + " ms");
  });
}

// The negative control of the test before.
TEST(PointToPoint, WithoutBellsAReceiverSleepsOn) {
  if (!has_futex_waitv()) GTEST_SKIP() << "Linux before 5.16";
  GroupTesting testing;
  testing.no_bells = true;
  const auto body = [](Group& group) {
    const double ms = time_to_wake(group);
    require(group.rank() == 0 || ms > 20, "it took " + std::to_string(ms) + " ms only");
  };
  for (const auto& result : run_ranks(2, body, 60, true, testing))
    EXPECT_EQ(result.exit_code, 0) << result.message;
}

TEST(PointToPoint, AReceiveThatIsWithdrawnTakesNoMessage) {
  expect_ranks(2, [](Group& group) {
    Numbers first(10, false);
    Numbers second(10, false);
    if (group.rank() == 0) {
      group.barrier(soon());
      second.fill(4);
      wait(group, send(group, second, 1));
    } else {
      const RequestPtr request = receive(group, first, 0);
      require(group.point_to_point().withdraw(request) && request->done(), "not withdrawn");
      require(!group.point_to_point().withdraw(request), "withdrawn twice");
      group.barrier(soon());
      wait(group, receive(group, second, 0));
      second.expect(4, "the second receive");
      first.expect(-1, "the first receive");
    }
  });
}

TEST(PointToPoint, AnAbortEndsWhatIsPending) {
  expect_ranks(2, [](Group& group) {
    const RequestPtr request = receive(group, Numbers(1, false), 1 - group.rank(), 3);
    std::thread aborter;
    if (group.rank() == 0) {
      aborter = std::thread([&] {
        std::this_thread::sleep_for(milliseconds(100));
        group.abort("the test says so");
      });
    }
    try {
      wait(group, request);
      throw std::runtime_error("no error");
    } catch (const Error& error) {
      require(std::string(error.what()).find("the test says so") != std::string::npos, error.what());
    }
    if (aborter.joinable()) aborter.join();
  });
}

// ---- a stranger's bytes ----

void expect_found_out(const std::function<void(Record&)>& lie, const std::string& text) {
  GroupTesting testing;
  bool liar = false;
  testing.lie = [&](void* said, bool is_record) {
    if (liar && is_record) lie(*static_cast<Record*>(said));
  };
  const auto results = run_ranks(
      2,
      [&](Group& group) {
        liar = group.rank() == 1;
        const Numbers numbers(liar ? 60000 : 60000, true);
        try {
          wait(group, liar ? send(group, numbers, 0) : receive(group, numbers, 1));
          require(liar, "believed");
        } catch (const Error& error) {
          require(liar || std::string(error.what()).find(text) != std::string::npos, error.what());
        }
      },
      60, true, testing);
  for (const auto& result : results)
    EXPECT_TRUE(result.exit_code == 0 && result.signal == 0) << result.message;
}

TEST(PointToPoint, MadeUpRecordsAreFoundOut) {
  for (const std::uint64_t at : {~std::uint64_t{1}, std::uint64_t{1} << 62, ~std::uint64_t{0} - 240000 + 1}) {
    expect_found_out([at](Record& record) { record.at = at; }, "names a place outside its arena");
  }
  expect_found_out([](Record& record) { record.kind = static_cast<RecordKind>(99); }, "a record of kind 99");
  expect_found_out(
      [](Record& record) {
        record.kind = RecordKind::kEager;
        record.bytes = std::uint64_t{1} << 40;
      },
      "an eager message of 1099511627776");
  for (const RecordKind kind : {RecordKind::kGo, RecordKind::kTaken, RecordKind::kRefused})
    expect_found_out([kind](Record& record) { record.kind = kind; }, "a message that it was not offered");
  expect_found_out([](Record& record) { record.bytes = 4; }, "The message was not delivered");
  expect_found_out([](Record& record) { record.dtype = 12345; }, "an unknown dtype");
}

}  // namespace
}  // namespace fccl::cpu
