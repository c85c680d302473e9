// all_to_all, gather, scatter, reduce_scatter and reduce between real processes: values, sizes around every
// border, in the arena and outside, mismatches.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/arena.h"
#include "cpu/group.h"
#include "cpu/tuning.h"
#include "ranks.h"

namespace fccl::cpu {
namespace {

using test::expect_ranks;
using test::require;

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

// What rank `from` sends to rank `to`.
std::int32_t value(int from, int to, std::size_t i) {
  return static_cast<std::int32_t>(i % 100000) + from * 1000003 + to * 7919;
}

// Tensors of one rank, one after the other as one tensor's rows are; on the heap or in the arena.
class Rows {
 public:
  Rows(const std::vector<std::size_t>& counts, bool in_arena) {
    std::size_t total = 0;
    for (const std::size_t count : counts) total += count;
    heap_.assign(in_arena ? 0 : total + 1, -1);
    if (in_arena) block_ = Arena::of_process()->allocate((total + 1) * 4, "test");
    auto* at = in_arena ? reinterpret_cast<std::int32_t*>(block_) : heap_.data();
    require(at != nullptr, "no arena");
    std::memset(at, 0xff, (total + 1) * 4);
    for (const std::size_t count : counts) {
      rows_.push_back(at);
      at += count;
    }
  }
  ~Rows() { Arena::of_process()->free(block_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  std::int32_t* operator[](int rank) const { return rows_[static_cast<std::size_t>(rank)]; }
  std::vector<const void*> inputs() const { return {rows_.begin(), rows_.end()}; }
  std::vector<void*> outputs() const { return {rows_.begin(), rows_.end()}; }

 private:
  std::vector<std::int32_t> heap_;
  std::byte* block_ = nullptr;
  std::vector<std::int32_t*> rows_;
};

// Around the borders of the paths, in elements.
std::vector<std::size_t> sizes_for(int ranks) {
  const Geometry g = geometry_for(ranks);
  const std::size_t shot = g.one_shot_bytes / 4;
  const std::size_t piece = g.piece_bytes / 4;
  return {0, 1, 33, shot / 2, shot - 1, shot + 1, piece, piece + 1, 5 * piece + 3};
}

class Exchanges : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Exchanges, testing::Values(1, 2, 3, 4, 7));

TEST_P(Exchanges, AllToAllOfEvenAndUnevenPieces) {
  const int ranks = GetParam();
  expect_ranks(ranks, [&](Group& group) {
    int round = 0;
    for (const std::size_t size : sizes_for(ranks)) {
      for (int form = 0; form < 6; ++form, ++round) {
        // Even; uneven, with empty pieces; on the heap, in the arena, or there on some ranks only.
        const auto count = [&](int from, int to) {
          if (form % 2 == 0) return size;
          return (from + to + round) % 3 == 0 ? std::size_t{0}
                                              : size + static_cast<std::size_t>(from * 3 + to);
        };
        const bool in_arena = form / 2 == 1 || (form / 2 == 2 && (group.rank() + round) % 2 == 0);
        std::vector<std::size_t> sends;
        std::vector<std::size_t> expects;
        for (int peer = 0; peer < ranks; ++peer) {
          sends.push_back(count(group.rank(), peer));
          expects.push_back(count(peer, group.rank()));
        }
        const Rows input(sends, in_arena);
        const Rows output(expects, false);
        for (int peer = 0; peer < ranks; ++peer) {
          for (std::size_t i = 0; i < sends[static_cast<std::size_t>(peer)]; ++i)
            input[peer][i] = value(group.rank(), peer, i);
        }
        const std::uint64_t before = group.zero_copy_count();
        group.all_to_all({input.inputs(), sends, output.outputs(), expects}, DType::kInt32, soon());
        for (int peer = 0; peer < ranks; ++peer) {
          for (std::size_t i = 0; i < expects[static_cast<std::size_t>(peer)]; ++i)
            require(output[peer][i] == value(peer, group.rank(), i), "wrong element");
        }
        if (form / 2 == 0) require(group.zero_copy_count() == before, "without copies");
        if (form / 2 == 1 && form % 2 == 0 && size * 4 > kZeroCopyBytes && ranks > 1)
          require(group.zero_copy_count() == before + 1, "with copies");
      }
    }
  });
}

TEST_P(Exchanges, GatherAndScatterWithEveryRoot) {
  const int ranks = GetParam();
  expect_ranks(ranks, [&](Group& group) {
    for (const std::size_t size : sizes_for(ranks)) {
      for (int root = 0; root < ranks; ++root) {
        const bool in_arena = (root + static_cast<int>(size)) % 2 == 0;
        const std::vector<std::size_t> all(static_cast<std::size_t>(ranks), size);
        const Rows many(all, in_arena);
        const Rows one({size}, in_arena);
        for (std::size_t i = 0; i < size; ++i) one[0][i] = value(group.rank(), root, i);
        group.gather(one[0], many.outputs(), size, DType::kInt32, root, soon());
        for (int peer = 0; peer < ranks; ++peer) {
          for (std::size_t i = 0; i < size; ++i) {
            require(many[peer][i] == (group.rank() == root ? value(peer, root, i) : -1), "gather");
            many[peer][i] = value(root, peer, i) + 5;
          }
        }
        group.scatter(many.inputs(), one[0], size, DType::kInt32, root, soon());
        for (std::size_t i = 0; i < size; ++i)
          require(one[0][i] == value(root, group.rank(), i) + 5, "scatter");
      }
    }
  });
}

TEST_P(Exchanges, ReduceScatterAndReduceEqualAllReduce) {
  const int ranks = GetParam();
  expect_ranks(ranks, [&](Group& group) {
    int round = 0;
    for (const std::size_t size : sizes_for(ranks)) {
      for (int form = 0; form < 4; ++form, ++round) {
        std::vector<std::size_t> counts;
        std::size_t total = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          counts.push_back(form % 2 == 0 ? size : size * static_cast<std::size_t>(rank) / 2 + 1);
          total += counts.back();
        }
        const auto mine = static_cast<std::size_t>(group.rank());
        const Rows input(counts, form >= 2);
        // Floats whose sums round, so that another order would show.
        auto* numbers = reinterpret_cast<float*>(input[0]);
        for (std::size_t i = 0; i < total; ++i)
          numbers[i] = 1.0F / static_cast<float>(i * 7 + mine * 13 + static_cast<std::size_t>(round) + 1);
        std::vector<float> whole(total + 1);
        group.all_reduce(numbers, whole.data(), total, DType::kFloat32, ReduceOp::kAvg, soon());
        std::vector<float> piece(counts[mine] + 1, -7);
        const std::uint64_t before = group.zero_copy_count();
        group.reduce_scatter(input.inputs(), counts, piece.data(), DType::kFloat32, ReduceOp::kAvg, soon());
        if (ranks > 1 && total * 4 > geometry_for(ranks).one_shot_bytes)
          require(group.zero_copy_count() == before + (form >= 2 ? 1 : 0), "the wrong path");
        std::size_t begin = 0;
        for (std::size_t rank = 0; rank < mine; ++rank) begin += counts[rank];
        require(std::memcmp(piece.data(), whole.data() + begin, counts[mine] * 4) == 0, "reduce_scatter");
        require(piece[counts[mine]] == -7, "written beyond the end");

        const int root = round % ranks;
        std::vector<float> reduced(total + 1, -7);
        group.reduce(numbers, reduced.data(), total, DType::kFloat32, ReduceOp::kAvg, root, soon());
        if (group.rank() == root) {
          require(std::memcmp(reduced.data(), whole.data(), total * 4) == 0, "reduce");
        } else {
          require(reduced[0] == -7, "reduce wrote on a rank that is not the root");
        }
        // In place.
        group.reduce_scatter(input.inputs(), counts, input[group.rank()], DType::kFloat32, ReduceOp::kAvg,
                             soon());
        require(std::memcmp(input[group.rank()], whole.data() + begin, counts[mine] * 4) == 0, "in place");
      }
    }
  });
}

template <typename Call>
void expect_mismatch(Call&& call, const std::string& text) {
  std::string message;
  try {
    call();
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kMismatch, error.what());
    message = error.what();
  }
  require(message.find(text) != std::string::npos, "expected '" + text + "' in: " + message);
}

TEST(Exchange, MisfitsAreFoundOnEveryRankAndSurvived) {
  expect_ranks(3, [](Group& group) {
    std::vector<std::int32_t> data(400000, 3);
    std::vector<std::int32_t> result(400000, -1);
    for (const std::size_t size : {10U, 50000U}) {
      // Rank 1 expects one element more of rank 2 than that one sends.
      std::vector<std::size_t> sends(3, size);
      std::vector<std::size_t> expects(3, size);
      if (group.rank() == 1) expects[2] += 1;
      const std::vector<const void*> inputs(3, data.data());
      const std::vector<void*> outputs = {result.data(), result.data() + 2 * size, result.data() + 4 * size};
      expect_mismatch([&] { group.all_to_all({inputs, sends, outputs, expects}, DType::kInt32, soon()); },
                      "rank 2 sends " + std::to_string(size) + " elements to rank 1, which expects " +
                          std::to_string(size + 1));
      require(result[0] == -1, "data was exchanged");
      const std::size_t count = size + (group.rank() == 2 ? 1 : 0);
      expect_mismatch([&] { group.gather(data.data(), outputs, count, DType::kInt32, 0, soon()); },
                      "the number of elements");
      expect_mismatch(
          [&] {
            group.scatter(inputs, result.data(), size, DType::kInt32, group.rank() == 2 ? 1 : 0, soon());
          },
          "the root rank");
      // Equal totals, cut at different places.
      std::vector<std::size_t> counts = {size, size + 2, size + 4};
      if (group.rank() == 2) std::swap(counts[0], counts[1]);
      expect_mismatch(
          [&] { group.reduce_scatter(inputs, counts, result.data(), DType::kInt32, ReduceOp::kSum, soon()); },
          "the list of sizes");
      expect_mismatch(
          [&] {
            group.reduce(data.data(), result.data(), size, DType::kInt32,
                         group.rank() == 0 ? ReduceOp::kSum : ReduceOp::kMax, 1, soon());
          },
          "the reduce op");
    }
    group.all_reduce(data.data(), result.data(), 100, DType::kInt32, ReduceOp::kSum, soon());
    require(result[99] == 9, "the group is not usable any more");
  });
}

TEST(Exchange, ManyInARowOfChangingKind) {
  expect_ranks(3, [](Group& group) {
    std::uint64_t random = 99;
    for (int round = 0; round < 200; ++round) {
      random = random * 6364136223846793005ULL + 1442695040888963407ULL;
      const std::size_t size = (random >> 40) % ((random >> 20) % 4 == 0 ? 200000 : 900);
      const int kind = static_cast<int>((random >> 33) % 4);
      const int root = static_cast<int>((random >> 50) % 3);
      const std::vector<std::size_t> all(3, size);
      const Rows input(all, (random >> 60) % 2 == 0);
      const Rows output(all, false);
      for (int peer = 0; peer < 3; ++peer) {
        for (std::size_t i = 0; i < size; ++i) input[peer][i] = value(group.rank(), peer, i) + round;
      }
      const auto expect = [&](std::int32_t got, std::int32_t wanted) {
        require(got == wanted, "wrong element");
      };
      if (kind == 0) {
        group.all_to_all({input.inputs(), all, output.outputs(), all}, DType::kInt32, soon());
        for (int peer = 0; peer < 3; ++peer) {
          for (std::size_t i = 0; i < size; ++i)
            expect(output[peer][i], value(peer, group.rank(), i) + round);
        }
      } else if (kind == 1) {
        group.gather(input[root], output.outputs(), size, DType::kInt32, root, soon());
        for (std::size_t i = 0; group.rank() == root && i < size; ++i)
          expect(output[2][i], value(2, root, i) + round);
      } else if (kind == 2) {
        group.reduce_scatter(input.inputs(), all, output[0], DType::kInt32, ReduceOp::kMax, soon());
        for (std::size_t i = 0; i < size; ++i) expect(output[0][i], value(2, group.rank(), i) + round);
      } else {
        group.reduce(input[0], output[0], size, DType::kInt32, ReduceOp::kMin, root, soon());
        for (std::size_t i = 0; group.rank() == root && i < size; ++i)
          expect(output[0][i], value(0, 0, i) + round);
      }
    }
  });
}

}  // namespace
}  // namespace fccl::cpu
