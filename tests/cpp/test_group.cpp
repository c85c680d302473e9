// Collectives of the engine between real processes: values, sizes around every border, mismatches.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cpu/group.h"
#include "cpu/tuning.h"
#include "ranks.h"

namespace fccl::cpu {
namespace {

using test::expect_ranks;
using test::require;

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

// Exact in float for up to 64 ranks: sums of these are integers below 2^24.
float value(int rank, std::size_t i, int round) {
  return static_cast<float>((i * 7 + static_cast<std::size_t>(rank * 13 + round * 5)) % 1000);
}

std::vector<std::size_t> interesting_counts(int ranks) {
  const Geometry g = geometry_for(ranks);
  const std::size_t shot = g.one_shot_bytes / 4;
  const std::size_t chunk = g.chunk_bytes / 4;
  return {0, 1, 2, 31, 33, shot - 1, shot, shot + 1, chunk - 1, chunk, chunk + 1, 3 * chunk, 7 * chunk + 5};
}

// A pipe's end of each rank arrives at every other one, also from a peer that is a call ahead.
TEST(Descriptors, ArriveByRankAndByCall) {
  expect_ranks(3, [&](Group& group) {
    for (int round = 0; round < 20; ++round) {
      int ends[2];
      require(::pipe(ends) == 0, "a pipe");
      const Descriptor reading(ends[0]);
      const Descriptor writing(ends[1]);
      const std::vector<Descriptor> theirs = group.exchange_descriptors(writing, soon());
      for (int rank = 0; rank < 3; ++rank) {
        const Descriptor& to = theirs[static_cast<std::size_t>(rank)];
        require(static_cast<bool>(to) == (rank != group.rank()), "one from each peer");
        const char word[2] = {static_cast<char>('0' + group.rank()), static_cast<char>(round)};
        if (to) require(::write(to.get(), word, 2) == 2, "it can be written to");
      }
      std::string heard;
      for (int i = 0; i < 2; ++i) {
        char word[2] = {};
        require(::read(reading.get(), word, 2) == 2 && word[1] == static_cast<char>(round), "of this round");
        heard += word[0];
      }
      std::sort(heard.begin(), heard.end());
      require(heard == (group.rank() == 0   ? "12"
                        : group.rank() == 1 ? "02"
                                            : "01"),
              "from each peer: " + heard);
    }
  });
}

TEST(Descriptors, ARankThatMakesAnotherCallIsNamed) {
  const auto results = test::run_ranks(2, [&](Group& group) {
    const Descriptor own(::dup(0));
    if (group.rank() == 0) {
      (void)group.exchange_descriptors(own, soon());
    } else {
      group.barrier(soon());
    }
  });
  for (const auto& result : results) {
    EXPECT_NE(result.message.find("rank 0 called gpu_setup"), std::string::npos) << result.message;
    EXPECT_NE(result.message.find("rank 1 called barrier"), std::string::npos) << result.message;
  }
}

TEST(Descriptors, APeerThatDiesIsNamed) {
  const auto results = test::run_ranks(2, [&](Group& group) {
    const Descriptor own(::dup(0));
    if (group.rank() == 1) {
      group.gate(Description::of(Collective::kGpuSetup, DType::kBytes, 0), soon());
      ::_exit(3);  // it came, and sent nothing
    }
    (void)group.exchange_descriptors(own, soon());
  });
  EXPECT_NE(results[0].message.find("the process of rank 1 ended"), std::string::npos) << results[0].message;
}

class Collectives : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, testing::Values(1, 2, 3, 4, 7));

TEST_P(Collectives, AllReduceSumIsExact) {
  const int ranks = GetParam();
  expect_ranks(ranks, [&](Group& group) {
    int round = 0;
    for (const std::size_t count : interesting_counts(ranks)) {
      for (const bool in_place : {true, false}) {
        ++round;
        std::vector<float> input(count);
        for (std::size_t i = 0; i < count; ++i) input[i] = value(group.rank(), i, round);
        const std::vector<float> before = input;
        std::vector<float> separate(count, -1);
        float* output = in_place ? input.data() : separate.data();
        group.all_reduce(input.data(), output, count, DType::kFloat32, ReduceOp::kSum, soon());
        for (std::size_t i = 0; i < count; ++i) {
          float expected = 0;
          for (int rank = 0; rank < ranks; ++rank) expected += value(rank, i, round);
          require(output[i] == expected, "element " + std::to_string(i) + " of " + std::to_string(count));
        }
        require(in_place || input == before, "the input was written");
      }
    }
  });
}

TEST_P(Collectives, BroadcastReachesEveryRankFromEveryRoot) {
  const int ranks = GetParam();
  expect_ranks(ranks, [&](Group& group) {
    int round = 0;
    for (const std::size_t count : interesting_counts(ranks)) {
      const int root = round % ranks;
      ++round;
      std::vector<float> buffer(count);
      for (std::size_t i = 0; i < count; ++i) buffer[i] = value(group.rank(), i, round);
      group.broadcast(buffer.data(), count, DType::kFloat32, root, soon());
      for (std::size_t i = 0; i < count; ++i) require(buffer[i] == value(root, i, round), "wrong element");
    }
  });
}

TEST_P(Collectives, AllGatherEvenAndUneven) {
  const int ranks = GetParam();
  expect_ranks(ranks, [&](Group& group) {
    int round = 0;
    for (const std::size_t base : interesting_counts(ranks)) {
      for (const bool uneven : {false, true}) {
        ++round;
        std::vector<std::size_t> counts;
        for (int rank = 0; rank < ranks; ++rank) {
          counts.push_back(uneven ? base * static_cast<std::size_t>(rank) / 2 + static_cast<std::size_t>(rank)
                                  : base);
        }
        std::vector<std::vector<float>> storage;
        std::vector<void*> outputs;
        for (const std::size_t count : counts) storage.emplace_back(count, -1.0F);
        for (auto& output : storage) outputs.push_back(output.data());
        std::vector<float> input(counts[static_cast<std::size_t>(group.rank())]);
        for (std::size_t i = 0; i < input.size(); ++i) input[i] = value(group.rank(), i, round);
        group.all_gather(input.data(), outputs, counts, DType::kFloat32, uneven, soon());
        for (int rank = 0; rank < ranks; ++rank) {
          const auto& output = storage[static_cast<std::size_t>(rank)];
          for (std::size_t i = 0; i < output.size(); ++i)
            require(output[i] == value(rank, i, round), "wrong element");
        }
      }
    }
  });
}

// Many collectives in a row, of changing kind and size, with ranks that dawdle at random: a slot that is
// written too early gives a wrong sum here.
TEST_P(Collectives, ManyInARowWithDawdlingRanks) {
  const int ranks = GetParam();
  expect_ranks(ranks, [&](Group& group) {
    const std::vector<std::size_t> counts = {1, 100, 5000, 40000, 200000, 0, 17};
    std::uint64_t random = static_cast<std::uint64_t>(group.rank()) + 1;
    for (int round = 0; round < 400; ++round) {
      random = random * 6364136223846793005ULL + 1442695040888963407ULL;
      if ((random >> 60) == 0) {
        const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds((random >> 40) % 300);
        while (std::chrono::steady_clock::now() < until) {
        }
      }
      const std::size_t count = counts[static_cast<std::size_t>(round) % counts.size()];
      std::vector<float> data(count);
      for (std::size_t i = 0; i < count; ++i) data[i] = value(group.rank(), i, round);
      if (round % 5 == 4) {
        const int root = round % ranks;
        group.broadcast(data.data(), count, DType::kFloat32, root, soon());
        for (std::size_t i = 0; i < count; ++i) require(data[i] == value(root, i, round), "broadcast");
      } else {
        group.all_reduce(data.data(), data.data(), count, DType::kFloat32, ReduceOp::kMax, soon());
        for (std::size_t i = 0; i < count; ++i) {
          float expected = 0;
          for (int rank = 0; rank < ranks; ++rank) expected = std::max(expected, value(rank, i, round));
          require(data[i] == expected,
                  "all_reduce " + std::to_string(round) + " element " + std::to_string(i));
        }
      }
      if (round % 7 == 0) group.barrier(soon());
    }
  });
}

ErrorKind kind_of(const std::function<void()>& function, std::string* message = nullptr) {
  try {
    function();
  } catch (const Error& error) {
    if (message != nullptr) *message = error.what();
    return error.kind();
  }
  throw std::runtime_error("no error was raised");
}

void reduce_works(Group& group) {
  float one = 1;
  group.all_reduce(&one, &one, 1, DType::kFloat32, ReduceOp::kSum, soon());
  require(one == static_cast<float>(group.world_size()), "the group is not usable any more");
}

TEST(Mismatch, AllRanksRaiseWithEveryCallAndTheGroupGoesOn) {
  expect_ranks(3, [](Group& group) {
    std::vector<float> data(10, 1);
    for (int round = 0; round < 40; ++round) {
      std::string message;
      const std::size_t count = group.rank() == 1 ? 7 : 5;
      require(kind_of(
                  [&] {
                    group.all_reduce(data.data(), data.data(), count, DType::kFloat32, ReduceOp::kSum,
                                     soon());
                  },
                  &message) == ErrorKind::kMismatch,
              "kind");
      require(message.find("ranks 0 and 2 called all_reduce(float32, count=5, op=sum)") != std::string::npos,
              message);
      require(message.find("rank 1 called all_reduce(float32, count=7, op=sum)") != std::string::npos,
              message);
      require(data == std::vector<float>(10, 1), "data was touched");
      reduce_works(group);
    }
  });
}

TEST(Mismatch, DifferentOperationsDtypesOpsAndRoots) {
  expect_ranks(2, [](Group& group) {
    std::vector<float> data(4, 1);
    const bool first = group.rank() == 0;
    const auto mismatch = [&](const std::function<void()>& call) {
      require(kind_of(call) == ErrorKind::kMismatch, "kind");
      reduce_works(group);
    };
    mismatch([&] {
      if (first)
        group.barrier(soon());
      else
        group.broadcast(data.data(), 4, DType::kFloat32, 0, soon());
    });
    mismatch([&] { group.broadcast(data.data(), 4, DType::kFloat32, first ? 0 : 1, soon()); });
    mismatch([&] { group.broadcast(data.data(), 4, first ? DType::kFloat32 : DType::kInt32, 0, soon()); });
    mismatch([&] {
      group.all_reduce(data.data(), data.data(), 4, DType::kFloat32, first ? ReduceOp::kSum : ReduceOp::kMax,
                       soon());
    });
    mismatch([&] {
      std::vector<float> out(8);
      const std::vector<void*> outputs = {out.data(), out.data() + 4};
      const std::vector<std::size_t> counts = {4, first ? std::size_t{4} : std::size_t{3}};
      group.all_gather(data.data(), outputs, counts, DType::kFloat32, true, soon());
    });
  });
}

TEST(Reject, PeersRaiseInsteadOfWaitingAndTheGroupGoesOn) {
  expect_ranks(2, [](Group& group) {
    std::vector<float> data(4, 1);
    for (int round = 0; round < 3; ++round) {
      std::string message;
      if (group.rank() == 1) {
        require(kind_of([&] {
                  group.all_reduce(data.data(), data.data(), 4, DType::kFloat32, ReduceOp::kBand, soon());
                }) == ErrorKind::kInvalid,
                "kind");
      } else {
        require(kind_of(
                    [&] {
                      group.all_reduce(data.data(), data.data(), 4, DType::kFloat32, ReduceOp::kSum, soon());
                    },
                    &message) == ErrorKind::kMismatch,
                "kind");
        require(message.find("band is not defined for float32") != std::string::npos, message);
      }
      reduce_works(group);
    }
    // The same on all ranks, several times in a row: nobody waits, and numbers stay in step.
    for (int round = 0; round < 12; ++round) {
      require(kind_of([&] {
                group.all_reduce(data.data(), data.data(), 4, DType::kFloat32, ReduceOp::kBor, soon());
              }) == ErrorKind::kInvalid,
              "kind");
    }
    reduce_works(group);
  });
}

// More rejected calls than there are lines, against peers that keep pace and against peers that do not.
TEST(Reject, ManyInARowNeverSkipANumber) {
  expect_ranks(2, [](Group& group) {
    std::vector<float> data(4, 1);
    const auto good = [&] {
      group.all_reduce(data.data(), data.data(), 4, DType::kFloat32, ReduceOp::kMax, soon());
    };
    const auto bad = [&] {
      group.all_reduce(data.data(), data.data(), 4, DType::kFloat32, ReduceOp::kBand, soon());
    };
    for (int round = 0; round < 100; ++round) {
      // Keeps within the lines: the peer's errors come first now and then.
      if (group.rank() == 0 && round % 8 == 7) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      require(kind_of(group.rank() == 0 ? std::function<void()>(bad) : std::function<void()>(good)) ==
                  (group.rank() == 0 ? ErrorKind::kInvalid : ErrorKind::kMismatch),
              "round " + std::to_string(round));
    }
    reduce_works(group);
  });
}

TEST(Reject, TooManyAheadOfThePeersWaitForThem) {
  expect_ranks(2, [](Group& group) {
    std::vector<float> data(4, 1);
    group.barrier(soon());
    if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    for (int i = 0; i < 50; ++i) {
      if (group.rank() == 1) {
        std::string message;
        require(kind_of([&] { group.barrier(soon()); }, &message) == ErrorKind::kMismatch, "kind");
        require(message.find("band is not defined for float32") != std::string::npos, message);
      } else {
        require(kind_of([&] {
                  group.all_reduce(data.data(), data.data(), 4, DType::kFloat32, ReduceOp::kBand, soon());
                }) == ErrorKind::kInvalid,
                "kind");
      }
    }
    reduce_works(group);
  });
}

TEST(Reject, TooManyAheadOfAPeerThatDoesNotComeFailTheGroup) {
  expect_ranks(2, [](Group& group) {
    std::vector<float> data(4, 1);
    group.barrier(soon());
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(700));
      return;
    }
    for (int i = 0; i < 30; ++i) {
      require(kind_of([&] {
                group.all_reduce(data.data(), data.data(), 4, DType::kFloat32, ReduceOp::kBand,
                                 Deadline::after(std::chrono::milliseconds(100)));
              }) == ErrorKind::kInvalid,
              "kind");
    }
    require(group.failure().has_value(), "numbers were skipped");
    require(group.failure()->kind() == ErrorKind::kTimeout, group.failure()->what());
  });
}

}  // namespace
}  // namespace fccl::cpu
