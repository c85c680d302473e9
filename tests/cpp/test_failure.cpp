// What ranks see when one of them dies, leaves, stalls, aborts or is interrupted; and that a rank which
// waits does not burn the processor.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "cpu/group.h"
#include "ranks.h"

namespace fccl::cpu {
namespace {

using Clock = std::chrono::steady_clock;
using test::expect_ranks;
using test::require;
using test::run_ranks;

struct Failed {
  ErrorKind kind;
  std::string message;
  std::chrono::milliseconds after;
};

Failed failure_of(const std::function<void()>& function) {
  const auto start = Clock::now();
  try {
    function();
  } catch (const Error& error) {
    return {error.kind(), error.what(), std::chrono::round<std::chrono::milliseconds>(Clock::now() - start)};
  }
  throw std::runtime_error("no error was raised");
}

void barrier(Group& group, int milliseconds) {
  group.barrier(Deadline::after(std::chrono::milliseconds(milliseconds)));
}

// A sticky failure is raised again, at once, by every later call.
void stays_failed(Group& group, ErrorKind kind) {
  const Failed again = failure_of([&] { barrier(group, 10000); });
  require(again.kind == kind && again.after < std::chrono::milliseconds(100), again.message);
}

TEST(Failure, DeathIsNoticedQuicklyByAll) {
  const auto results = run_ranks(3, [](Group& group) {
    barrier(group, 10000);
    if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
    const Failed failed = failure_of([&] { barrier(group, 20000); });
    require(failed.kind == ErrorKind::kPeerDied || failed.kind == ErrorKind::kPeerFailed, failed.message);
    require(failed.message.find("rank 1") != std::string::npos, failed.message);
    require(failed.after < std::chrono::seconds(2),
            "it took " + std::to_string(failed.after.count()) + " ms");
    stays_failed(group, failed.kind);
  });
  EXPECT_EQ(results[1].signal, SIGKILL);
  EXPECT_EQ(results[0].exit_code, 0) << results[0].message;
  EXPECT_EQ(results[2].exit_code, 0) << results[2].message;
}

// Forked children hold copies of the rank's sockets; a death must be seen all the same.
TEST(Failure, DeathIsNoticedWhileForkedChildrenLive) {
  const auto results = run_ranks(2, [](Group& group) {
    barrier(group, 10000);
    if (group.rank() == 1) {
      if (::fork() == 0) {
        ::sleep(5);
        ::_exit(0);
      }
      ::kill(::getpid(), SIGKILL);
    }
    const Failed failed = failure_of([&] { barrier(group, 20000); });
    require(failed.kind == ErrorKind::kPeerDied && failed.after < std::chrono::seconds(2), failed.message);
  });
  EXPECT_EQ(results[0].exit_code, 0) << results[0].message;
}

TEST(Failure, DeathInTheMiddleOfALargeMessage) {
  const auto results = run_ranks(2, [](Group& group) {
    std::vector<float> data(64 << 20, 1);
    if (group.rank() == 1) {
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        ::kill(::getpid(), SIGKILL);
      }).detach();
    }
    const Failed failed = failure_of([&] {
      while (true) {
        group.all_reduce(data.data(), data.data(), data.size(), DType::kFloat32, ReduceOp::kSum,
                         Deadline::after(std::chrono::seconds(20)));
      }
    });
    require(failed.kind == ErrorKind::kPeerDied, failed.message);
  });
  EXPECT_EQ(results[0].exit_code, 0) << results[0].message;
}

TEST(Failure, LeavingIsNotDying) {
  expect_ranks(2, [](Group& group) {
    barrier(group, 10000);
    if (group.rank() == 1) {
      group.leave("the test says so");
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return;
    }
    const Failed failed = failure_of([&] { barrier(group, 20000); });
    require(failed.kind == ErrorKind::kPeerLeft, failed.message);
    require(failed.message.find("rank 1 has left the group: the test says so") != std::string::npos,
            failed.message);
  });
}

// A rank that has done its part may go: the others still finish.
TEST(Failure, APeerThatDidItsPartMayLeaveOrDie) {
  expect_ranks(3, [](Group& group) {
    for (int round = 0; round < 3; ++round) barrier(group, 10000);
    if (group.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    float one = 1;
    if (group.rank() == 0) {
      // Arrives, and is gone long before rank 2 comes; it cannot finish the call itself.
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        ::_exit(0);
      }).detach();
    }
    group.all_reduce(&one, &one, 1, DType::kFloat32, ReduceOp::kSum,
                     Deadline::after(std::chrono::seconds(10)));
    require(one == 3, "wrong sum");
  });
}

TEST(Failure, TimeoutNamesTheMissingRankAndBothPositions) {
  expect_ranks(3, [](Group& group) {
    barrier(group, 10000);
    if (group.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      const Failed late = failure_of([&] { barrier(group, 10000); });
      require(late.kind == ErrorKind::kPeerFailed && late.message.find("timed out") != std::string::npos,
              late.message);
      return;
    }
    const Failed failed = failure_of([&] { barrier(group, 300); });
    require(failed.kind == ErrorKind::kTimeout || failed.kind == ErrorKind::kPeerFailed, failed.message);
    require(failed.message.find("rank 2 has not called it (its last collective is #1)") != std::string::npos,
            failed.message);
    require(failed.message.find("collective #2") != std::string::npos, failed.message);
    stays_failed(group, failed.kind);
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  });
}

TEST(Failure, AbortFromAnotherThreadStopsTheWaitHereAndThere) {
  expect_ranks(2, [](Group& group) {
    barrier(group, 10000);
    if (group.rank() == 1) {
      // Waits in another collective, so the two never meet by accident.
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
      const Failed failed = failure_of([&] { barrier(group, 20000); });
      require(failed.kind == ErrorKind::kPeerFailed, failed.message);
      require(failed.message.find("because the test says so") != std::string::npos, failed.message);
      return;
    }
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      group.abort("because the test says so");
    });
    const Failed failed = failure_of([&] { barrier(group, 20000); });
    aborter.join();
    require(failed.kind == ErrorKind::kAborted && failed.after < std::chrono::seconds(2), failed.message);
    std::this_thread::sleep_for(std::chrono::milliseconds(800));
  });
}

TEST(Failure, AnInterruptStopsTheWait) {
  expect_ranks(2, [](Group& group) {
    barrier(group, 10000);
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      const Failed failed = failure_of([&] { barrier(group, 20000); });
      require(
          failed.kind == ErrorKind::kPeerFailed && failed.message.find("interrupted") != std::string::npos,
          failed.message);
      return;
    }
    const auto at = Clock::now() + std::chrono::milliseconds(150);
    set_interrupt_check([at] {
      if (Clock::now() > at) throw std::runtime_error("stop");
    });
    bool stopped = false;
    try {
      barrier(group, 20000);
    } catch (const std::runtime_error& error) {
      stopped = std::string(error.what()) == "stop";
    }
    set_interrupt_check(nullptr);
    require(stopped, "the interrupt check was not run");
    stays_failed(group, ErrorKind::kInterrupted);
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
  });
}

TEST(Failure, AMissingRankAtTheFirstCollectiveIsNamed) {
  const auto results = run_ranks(
      3,
      [](Group& group) {
        if (group.rank() == 1) return;
        const Failed failed =
            failure_of([&] { group.connect(Deadline::after(std::chrono::milliseconds(300))); });
        require(failed.kind == ErrorKind::kTimeout, failed.message);
        require(failed.message.find("rank 1 did not come") != std::string::npos, failed.message);
      },
      30, false);
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.message;
}

TEST(Failure, SharedMemoryTurnedOffOnOneRankIsAJointDecision) {
  const auto results = run_ranks(
      3,
      [](Group& group) {
        if (group.rank() == 2) ::setenv("FCCL_SHM", "0", 1);
        require(!group.connect(Deadline::after(std::chrono::seconds(10))), "it connected");
        require(group.why_not().find("rank 2: the environment variable FCCL_SHM") != std::string::npos,
                group.why_not());
      },
      30, false);
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.message;
}

// A rank that cannot open another descriptor in the middle of the handshake takes all of them, quickly, to
// the inner engine.
TEST(Failure, TroubleOfOneRankInTheHandshakeIsAJointDecision) {
  const auto results = run_ranks(
      3,
      [](Group& group) {
        if (group.rank() == 2) {
          // Leaves three descriptors: for the arena, the listener and the store's files in turn, but not for
          // a socket to each peer.
          int last = 0;
          while (last < 50) last = ::dup(0);
          ::close(last);
          ::close(last - 1);
          ::close(last - 2);
          const rlimit limit{static_cast<rlim_t>(last + 1), static_cast<rlim_t>(last + 1)};
          ::setrlimit(RLIMIT_NOFILE, &limit);
        }
        const auto start = Clock::now();
        require(!group.connect(Deadline::after(std::chrono::seconds(20))), "it connected");
        require(Clock::now() - start < std::chrono::seconds(3), "the ranks waited for their deadline");
        require(group.why_not().find("rank 2") != std::string::npos ||
                    group.why_not().find("trouble") != std::string::npos,
                group.why_not());
      },
      30, false);
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.message;
}

// A rank that gives up at any moment of the set-up, or soon after, is noticed by the other at once.
TEST(Failure, ARankThatGivesUpInTheSetUpIsNoticed) {
  for (int microseconds = 0; microseconds < 3000; microseconds += 200) {
    const auto results = run_ranks(
        2,
        [&](Group& group) {
          std::thread aborter;
          if (group.rank() == 1) {
            aborter = std::thread([&] {
              std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
              group.abort("the test says so");
            });
          }
          const auto start = Clock::now();
          std::optional<Error> error;
          try {
            group.connect(Deadline::after(std::chrono::seconds(20)));
            while (true) barrier(group, 20000);
          } catch (const Error& caught) {
            error = caught;
          }
          if (aborter.joinable()) aborter.join();
          require(error->kind() == ErrorKind::kAborted || error->kind() == ErrorKind::kPeerFailed,
                  error->what());
          require(std::string(error->what()).find("the test says so") != std::string::npos, error->what());
          require(Clock::now() - start < std::chrono::seconds(5), "it took its time");
          std::this_thread::sleep_for(std::chrono::milliseconds(200));  // a rank that is gone is another test
        },
        30, false);
    for (const auto& result : results)
      EXPECT_EQ(result.exit_code, 0) << microseconds << ": " << result.message;
  }
}

TEST(Failure, AForkedChildMayNotUseTheGroup) {
  expect_ranks(2, [](Group& group) {
    barrier(group, 10000);
    const pid_t child = ::fork();
    if (child == 0) {
      const Failed failed = failure_of([&] { barrier(group, 1000); });
      ::_exit(failed.message.find("forked after the group was made") != std::string::npos ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child was let in");
    barrier(group, 10000);
  });
}

// Three ranks share two cores: a group of two of them has no core for each rank of the machine either.
TEST(Waiting, WhetherToSpinIsDecidedByTheRanksOfTheNode) {
  cpu_set_t usable;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(usable), &usable), 0);
  if (CPU_COUNT(&usable) < 2) GTEST_SKIP() << "needs two cores";
  const auto use_two_cores = [&usable] {
    cpu_set_t two;
    CPU_ZERO(&two);
    for (std::size_t cpu = 0; CPU_COUNT(&two) < 2; ++cpu) {
      if (CPU_ISSET(cpu, &usable)) CPU_SET(cpu, &two);
    }
    require(::sched_setaffinity(0, sizeof(two), &two) == 0, "no affinity");
  };
  const test::TemporaryDirectory directory;
  const auto all_return = [](const std::vector<test::RankResult>& results) {
    for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.message;
  };
  all_return(run_ranks(
      2,
      [&](Group& group) {
        use_two_cores();
        require(group.connect(Deadline::after(std::chrono::seconds(20))), group.why_not());
        require(group.spins(), "two ranks on two cores do not spin");
      },
      30, false));
  all_return(run_ranks(
      3,
      [&](Group& group) {
        use_two_cores();
        require(group.connect(Deadline::after(std::chrono::seconds(20))), group.why_not());
        require(!group.spins(), "three ranks on two cores spin");
        if (group.rank() != 2) {
          Group pair({group.rank(), 2, "pair", std::make_shared<test::DirectoryStore>(directory.path())});
          require(pair.connect(Deadline::after(std::chrono::seconds(20))), pair.why_not());
          require(!pair.spins(), "two of three ranks on two cores spin");
        }
        barrier(group, 20000);
      },
      30, false));
}

TEST(Waiting, ALongWaitCostsLittleProcessorTime) {
  expect_ranks(2, [](Group& group) {
    barrier(group, 10000);
    if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(2));
    rusage before{};
    rusage after{};
    ::getrusage(RUSAGE_SELF, &before);
    barrier(group, 20000);
    ::getrusage(RUSAGE_SELF, &after);
    const auto microseconds = [](const rusage& u) {
      return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000000L + u.ru_utime.tv_usec + u.ru_stime.tv_usec;
    };
    const long used = microseconds(after) - microseconds(before);
    require(used < 20000, "a wait of 2 s used " + std::to_string(used) + " us");
  });
}

}  // namespace
}  // namespace fccl::cpu
