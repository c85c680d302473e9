// What a peer says is a stranger's bytes: places outside its arena and made-up sizes are errors that name it,
// on the ranks that read them, and never an access outside of what is mapped.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "common/description.h"
#include "cpu/arena.h"
#include "cpu/group.h"
#include "ranks.h"

namespace fccl::cpu {
namespace {

using test::RankFunction;
using test::require;
using test::run_ranks;

constexpr std::size_t kCount = 60000;
constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
constexpr int kLiar = 1;

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

// Three words for each peer in a row: bytes sent, bytes expected, place in the arena (see exchange.cpp).
std::uint64_t& word(void* row, int peer, int which) {
  return static_cast<std::uint64_t*>(row)[peer * 3 + which];
}

// Ranks make `call`, the liar saying what `lie` makes of its words; the others must raise an error with
// `text`.
void expect_found_out(const std::function<void(void* said, bool is_row)>& lie, const RankFunction& call,
                      const std::string& text, ErrorKind kind) {
  int lies = 0;  // each rank's own after the fork
  bool on = false;
  int rank = -1;
  GroupTesting testing;
  testing.lie = [&](void* said, bool is_row) {
    if (!on || rank != kLiar) return;
    ++lies;
    lie(said, is_row);
  };
  const auto results = run_ranks(
      3,
      [&](Group& group) {
        rank = group.rank();
        on = true;
        std::string message;
        try {
          call(group);
        } catch (const Error& error) {
          // A rank may hear of the lie from the one that read it first.
          const bool heard = kind == ErrorKind::kSystem && error.kind() == ErrorKind::kPeerFailed;
          require(rank == kLiar || error.kind() == kind || heard, error.what());
          message = error.what();
        }
        // Nobody leaves before all have seen for themselves.
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        if (rank == kLiar) {
          require(lies != 0, "it told the truth");
        } else {
          require(message.find(text) != std::string::npos, "expected '" + text + "' in: " + message);
        }
      },
      60, true, testing);
  for (const auto& result : results)
    EXPECT_TRUE(result.exit_code == 0 && result.signal == 0) << result.message;
}

void all_reduce_in_arena(Group& group) {
  auto* data = reinterpret_cast<float*>(Arena::of_process()->allocate(kCount * 4, "test"));
  for (std::size_t i = 0; i < kCount; ++i) data[i] = 1;
  group.all_reduce(data, data, kCount, DType::kFloat32, ReduceOp::kSum, soon());
}

void all_to_all(Group& group, std::size_t count) {
  auto* data = reinterpret_cast<float*>(Arena::of_process()->allocate(3 * count * 4, "test"));
  std::vector<float> result(3 * count);
  const std::vector<const void*> inputs = {data, data + count, data + 2 * count};
  const std::vector<void*> outputs = {result.data(), result.data() + count, result.data() + 2 * count};
  const std::vector<std::size_t> counts(3, count);
  group.all_to_all({inputs, counts, outputs, counts}, DType::kFloat32, soon());
}

class Places : public testing::TestWithParam<std::uint64_t> {};
// The end of the arena, beyond it, and where offset + size wraps around.
INSTANTIATE_TEST_SUITE_P(Outside, Places, testing::Values(0, 1ULL << 62, kMost - 1, kMost - kCount * 4 + 1));

std::uint64_t place() {
  const std::uint64_t parameter = Places::GetParam();
  return parameter == 0 ? Arena::of_process()->capacity() - kCount * 4 + 1 : parameter;
}

TEST_P(Places, OfATensorAreChecked) {
  for (const bool input : {true, false}) {
    expect_found_out(
        [input](void* said, bool) {
          auto& description = *static_cast<Description*>(said);
          (input ? description.input_at : description.output_at) = place();
        },
        all_reduce_in_arena, "rank 1 says that its tensor of 240000 bytes begins at", ErrorKind::kSystem);
  }
}

TEST_P(Places, OfAPieceAreChecked) {
  expect_found_out(
      [](void* said, bool is_row) {
        if (!is_row) return;
        for (int peer = 0; peer < 3; ++peer) word(said, peer, 2) = place();
      },
      [](Group& group) { all_to_all(group, kCount); },
      "rank 1 says that its tensor of 240000 bytes begins at", ErrorKind::kSystem);
}

class Sizes : public testing::TestWithParam<std::size_t> {};
// In the one-shot slots, and in the arena.
INSTANTIATE_TEST_SUITE_P(Pieces, Sizes, testing::Values(10, kCount));

TEST_P(Sizes, ThatNobodyExpectsAreAMismatch) {
  for (const std::uint64_t size : {kMost, kMost / 2 + 1, std::uint64_t{4}}) {
    for (const int which : {0, 1}) {
      expect_found_out(
          [&](void* said, bool is_row) {
            if (is_row) word(said, 2, which) = size;
          },
          [](Group& group) { all_to_all(group, GetParam()); },
          which == 0 ? "rank 1 sends " + std::to_string(size / 4) + " elements to rank 2"
                     : "elements to rank 1, which expects " + std::to_string(size / 4),
          ErrorKind::kMismatch);
    }
  }
}

// Between the liar and itself nobody else has a say, yet its pieces for the others lie behind that one.
TEST_P(Sizes, OfThePieceForItselfMoveNothingOfOthers) {
  expect_found_out(
      [&](void* said, bool is_row) {
        if (is_row) word(said, kLiar, 0) = word(said, kLiar, 1) = kMost - 3;
      },
      [](Group& group) {
        all_to_all(group, GetParam());
        throw Error(ErrorKind::kSystem, "came through");
      },
      "came through", ErrorKind::kSystem);
}

}  // namespace
}  // namespace fccl::cpu
