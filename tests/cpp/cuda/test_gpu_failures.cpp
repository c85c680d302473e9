// How a group of GPUs fails, on fakes of the GPU: a rank that does not come, calls that differ or are
// refused, an abort, launches that go wrong; and what is left when it is closed.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <stdexcept>
#include <thread>

#include "cuda/gpu_world.h"

namespace fccl::cuda {
namespace {

using host::all_reduce_of;
using host::expect_failed;
using host::Fails;
using host::Group;
using host::on_all_ranks;
using host::Quiet;
using host::Rank;
using host::run;
using host::stream;

TEST(GpuFailure, a_rank_that_does_not_come_is_named) {
  Group world(3);
  world.connect([](int, GpuGroupConfig& config) { config.timeout = std::chrono::milliseconds(200); });
  on_all_ranks(3, [&](int r) {
    if (r == 2) return;
    std::vector<float> values(5, 1.0f);
    run(*world[r].group, all_reduce_of(5), values.data(), values.data());
    for (const float value : values) EXPECT_TRUE(std::isnan(value));
    const auto failure = world[r].group->failure();
    ASSERT_TRUE(failure.has_value());
    // Whoever notices first names rank 2; the other may name the one who told it.
    if (failure->kind() == ErrorKind::kTimeout) {
      expect_failed(
          *world[r].group, ErrorKind::kTimeout,
          {"all_reduce(float32, count=5, op=sum)", "group 'g'", "rank 2 did not come within 200 ms"});
    } else {
      expect_failed(*world[r].group, ErrorKind::kPeerFailed, {"gave up"});
    }
  });
  // The late one fails as well, and at once.
  float value = 1;
  run(*world[2].group, all_reduce_of(1), &value, &value);
  EXPECT_TRUE(std::isnan(value));
  expect_failed(*world[2].group, ErrorKind::kPeerFailed, {"gave up"});
  world.close();
}

TEST(GpuFailure, calls_that_differ_are_named) {
  Group world(2);
  world.connect();
  on_all_ranks(2, [&](int r) {
    std::vector<float> values(6, 1.0f);
    run(*world[r].group, all_reduce_of(r == 0 ? 5 : 6), values.data(), values.data());
    EXPECT_TRUE(std::isnan(values[0]));
    const auto failure = world[r].group->failure();
    ASSERT_TRUE(failure.has_value());
    if (std::string(failure->what()).find("do not fit") != std::string::npos) {
      EXPECT_NE(std::string(failure->what()).find("rank 0 called all_reduce(float32, count=5, op=sum)"),
                std::string::npos);
      EXPECT_NE(std::string(failure->what()).find("rank 1 called all_reduce(float32, count=6, op=sum)"),
                std::string::npos);
    } else {
      EXPECT_NE(std::string(failure->what()).find("gave up"), std::string::npos) << failure->what();
    }
  });
  world.close();
  world.expect_nothing_left();
}

TEST(GpuFailure, abort_ends_a_kernel_that_waits) {
  Group world(2);
  world.connect();
  std::thread aborts([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    world[1].group->abort("the user asked for it");
  });
  float value = 1;
  run(*world[0].group, all_reduce_of(1), &value, &value);  // its timeout would be 30 s
  aborts.join();
  EXPECT_TRUE(std::isnan(value));
  expect_failed(*world[0].group, ErrorKind::kPeerFailed, {"rank 1 gave up"});
  expect_failed(*world[1].group, ErrorKind::kAborted, {"the user asked for it"});
  world.close();
}

// A launch that fails on one rank: its peers are told, and do not wait for it.
TEST(GpuFailure, a_launch_that_fails_fails_the_group) {
  Group world(2);
  world.connect();
  world[1].gpu->fails = Fails::kLaunch;
  on_all_ranks(2, [&](int r) {
    float value = 1;
    if (r == 0) {
      run(*world[0].group, all_reduce_of(1), &value, &value);
      EXPECT_TRUE(std::isnan(value));
      expect_failed(*world[0].group, ErrorKind::kPeerFailed, {"rank 1 gave up"});
    } else {
      EXPECT_THROW(run(*world[1].group, all_reduce_of(1), &value, &value), Error);
      expect_failed(*world[1].group, ErrorKind::kAborted,
                    {"all_reduce(float32, count=1, op=sum) could not be launched: no room"});
    }
  });
  world.close();
  world.expect_nothing_left();
}

// As where the queue of launches is full: abort() and close() must get through, or nobody ends it.
TEST(GpuFailure, a_launch_that_blocks_does_not_hold_up_abort) {
  Quiet world;
  std::atomic<bool> blocked{false};
  std::atomic<bool> goes_on{false};
  world.gpu().at_launch = [&] {
    blocked = true;
    while (!goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  std::thread caller([&] { world.call(1); });
  while (!blocked) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  world.group().abort("enough");
  EXPECT_EQ(world.gpu().pokes, 3);  // one of the set-up
  EXPECT_TRUE(world.group().failure().has_value());
  goes_on = true;
  caller.join();
  world.gpu().at_launch = nullptr;
}

// What hangs on the device for good keeps the memory it uses.
TEST(GpuFailure, what_hangs_keeps_its_memory) {
  Quiet world;
  world.call(1);
  world.gpu().busy = true;
  world.gpu().hangs = true;
  world.close();
  EXPECT_EQ(world.gpu().allocations, 1);
  EXPECT_EQ(world.gpu().mappings, 1);
  EXPECT_EQ(world[1].gpu->allocations, 0);
}

// What nobody will finish is not waited for till its timeout; what is done is not disturbed.
TEST(GpuFailure, closing_aborts_what_is_left) {
  for (const bool busy : {false, true}) {
    Quiet world;
    world.call(1);
    world.gpu().busy = busy;
    world.gpu().pokes = 0;
    world.close();
    EXPECT_EQ(world.gpu().pokes, busy ? 2 : 0);  // of both ranks' abort words
  }
}

// A peer that is gone may still have this rank's memory mapped.
TEST(GpuFailure, without_a_meeting_only_counted_memory_is_freed) {
  for (const auto kind : {Export::Kind::kDescriptor, Export::Kind::kIpcHandle}) {
    Group world(2);
    for (Rank& rank : world.ranks) rank.gpu->kind = kind;
    world.connect();
    world[0].group->close(nullptr);
    EXPECT_EQ(world[0].gpu->mappings, 0);
    EXPECT_EQ(world[0].gpu->allocations, kind == Export::Kind::kDescriptor ? 0 : 1);
    float value = 0;
    EXPECT_THROW(world[0].group->launch({}, all_reduce_of(1), &value, &value, stream(1)), Error);
    EXPECT_FALSE(world[0].group->failure().has_value());  // what was called before went well
    world[1].group->close(nullptr);
  }
}

TEST(GpuFailure, a_lost_rank_ends_a_kernel_that_waits) {
  Group world(3);
  world.connect();
  std::thread watches([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (int r = 0; r < 2; ++r) world[r].group->end_waits("rank 2 has left the group");
  });
  on_all_ranks(2, [&](int r) {
    float value = 1;
    run(*world[r].group, all_reduce_of(1), &value, &value);  // its timeout would be 30 s
    EXPECT_TRUE(std::isnan(value));
    expect_failed(*world[r].group, ErrorKind::kPeerDied,
                  {"all_reduce(float32", "rank 2 has left the group."});
  });
  watches.join();
  world.close();
}

TEST(GpuFailure, a_lost_rank_that_nobody_waits_for_fails_nothing) {
  Group world(2);
  world.connect();
  on_all_ranks(2, [&](int r) {
    float value = 1;
    run(*world[r].group, all_reduce_of(1), &value, &value);
    EXPECT_EQ(value, 2);
  });
  world[0].group->end_waits("rank 1 has left the group");
  EXPECT_FALSE(world[0].group->failure().has_value());
  float value = 1;
  run(*world[0].group, all_reduce_of(1), &value, &value);  // who needs it learns of it, and at once
  expect_failed(*world[0].group, ErrorKind::kPeerDied, {"rank 1 has left the group."});
  EXPECT_FALSE(world[1].group->failure().has_value());
  world.close();
}

// ---- calls that a rank refuses ----

TEST(GpuRefusal, a_call_that_all_refuse_leaves_the_group_usable) {
  Group world(3);
  world.connect();
  on_all_ranks(3, [&](int r) {
    GpuGroup& group = *world[r].group;
    for (int round = 0; round < 3; ++round) {
      group.refuse(stream(1));
      std::vector<float> values(9, static_cast<float>(r));
      run(group, all_reduce_of(9), values.data(), values.data());
      EXPECT_EQ(values, std::vector<float>(9, 3.0f));
    }
    EXPECT_FALSE(group.failure().has_value());
    EXPECT_EQ(group.launch_counts(), (std::map<std::string, std::int64_t>{{"one-shot all_reduce", 3}}));
  });
  world.close();
  world.expect_nothing_left();
}

TEST(GpuRefusal, peers_hear_of_it_at_once) {
  for (const std::uint64_t count : {5u, 100'000u}) {  // of one block, and of several
    Group world(2);
    world.connect();  // with a timeout of 30 s
    const Deadline soon = Deadline::after(std::chrono::seconds(10));
    on_all_ranks(2, [&](int r) {
      GpuGroup& group = *world[r].group;
      if (r == 1) {
        group.refuse(stream(1));
      } else {
        std::vector<float> values(count, 1.0f);
        run(group, all_reduce_of(count), values.data(), values.data());
        EXPECT_TRUE(std::isnan(values[0]) && std::isnan(values[count - 1]));
      }
    });
    EXPECT_FALSE(soon.expired());
    int named = 0;
    for (int r = 0; r < 2; ++r) {
      const auto failure = world[r].group->failure();
      ASSERT_TRUE(failure.has_value());
      const std::string text = failure->what();
      named += text.find("do not fit") != std::string::npos;
      EXPECT_TRUE(text.find("rank 1 refused the call it was to make") != std::string::npos ||
                  text.find("gave up") != std::string::npos)
          << text;
    }
    EXPECT_GE(named, 1);  // who notices first; the other may have been told
    world.close();
    world.expect_nothing_left();
  }
}

TEST(GpuFailure, a_call_has_a_timeout_of_its_own) {
  Group world(2);
  world.connect();  // 30 s
  const GpuCall call = all_reduce_of(3);
  float values[3] = {};
  world[0].group->launch(world[0].group->plan(call, stream(1)), call, values, values, stream(1),
                         std::chrono::milliseconds(150));
  expect_failed(*world[0].group, ErrorKind::kTimeout, {"rank 1 did not come within 150 ms"});
  world.close();
}

TEST(GpuFailure, so_does_an_exception_that_is_not_fccls) {
  Group world(2);
  world.connect();
  world[0].gpu->fails = Fails::kMemory;
  float value = 0;
  EXPECT_THROW(run(*world[0].group, all_reduce_of(1), &value, &value), Error);
  expect_failed(*world[0].group, ErrorKind::kAborted, {"could not be launched: std::bad_alloc"});
  run(*world[1].group, all_reduce_of(1), &value, &value);  // its timeout would be 30 s
  EXPECT_TRUE(std::isnan(value));
  expect_failed(*world[1].group, ErrorKind::kPeerFailed, {"rank 0 gave up"});
  world.close();
}

}  // namespace
}  // namespace fccl::cuda
