// What makes calls of a collective fit, what the message says when they do not, and garbage.
#include "common/description.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace fccl {
namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

Description all_reduce(std::uint64_t count = 3, DType dtype = DType::kFloat32, ReduceOp op = ReduceOp::kSum) {
  return Description::of(Collective::kAllReduce, dtype, count, -1, op);
}

Description call(Collective collective, std::uint64_t count = 3, int root = -1) {
  return Description::of(collective, DType::kFloat32, count, root);
}

AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return AssertionSuccess();
  return AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
}

std::string verdict(std::vector<Description> calls) { return check_compatible(calls); }

TEST(Description, equal_calls_fit) {
  for (int c = 1; c < kCollectiveCount; ++c) {
    const auto collective = static_cast<Collective>(c);
    if (collective == Collective::kRejected) continue;
    const Description d = call(collective, 7, 1);
    EXPECT_EQ(verdict({d, d, d}), "") << name_of(collective);
    EXPECT_EQ(verdict({d}), "") << name_of(collective);
  }
  EXPECT_EQ(verdict({}), "");
}

TEST(Description, says_what_differs_and_who_called_what) {
  const std::string message =
      verdict({all_reduce(3), all_reduce(4), all_reduce(3), all_reduce(4), all_reduce(3)});
  EXPECT_TRUE(contains(message, "the number of elements differs"));
  EXPECT_TRUE(contains(message, "ranks 0, 2 and 4 called all_reduce(float32, count=3, op=sum)"));
  EXPECT_TRUE(contains(message, "ranks 1 and 3 called all_reduce(float32, count=4, op=sum)"));
  EXPECT_TRUE(contains(message, "the group stays usable"));
}

TEST(Description, each_field_that_matters) {
  EXPECT_TRUE(contains(verdict({all_reduce(), call(Collective::kBroadcast, 3, 0)}), "the operation differs"));
  EXPECT_TRUE(contains(verdict({all_reduce(), call(Collective::kBarrier)}), "rank 1 called barrier()"));
  EXPECT_TRUE(contains(verdict({all_reduce(), all_reduce(3, DType::kFloat64)}), "the dtype differs"));
  EXPECT_TRUE(contains(verdict({all_reduce(), all_reduce(3, DType::kFloat32, ReduceOp::kMax)}),
                       "the reduce op differs; rank 0 called all_reduce(float32, count=3, op=sum); "
                       "rank 1 called all_reduce(float32, count=3, op=max)"));
  for (const Collective rooted :
       {Collective::kBroadcast, Collective::kReduce, Collective::kGather, Collective::kScatter}) {
    const std::string message = verdict({call(rooted, 3, 0), call(rooted, 3, 1)});
    EXPECT_TRUE(contains(message, "the root rank differs"));
    EXPECT_TRUE(contains(message, "root=1"));
  }
  Description two = all_reduce();
  two.tensors = 2;
  EXPECT_TRUE(contains(verdict({all_reduce(), two}), "the number of tensors differs"));
  EXPECT_TRUE(contains(verdict({all_reduce(), two}), "tensors=2"));
  Description output = call(Collective::kAllGather);
  output.output_count = 6;
  Description other_output = output;
  other_output.output_count = 9;
  EXPECT_TRUE(contains(verdict({output, other_output}), "the number of output elements differs"));
  EXPECT_TRUE(contains(verdict({output, other_output}), "output_count=9"));
}

TEST(Description, fields_that_do_not_matter) {
  Description a = call(Collective::kAllGather), b = a;
  a.reduce_op = ReduceOp::kMin;  // all_gather has no op
  a.root = 0;                    // nor root
  EXPECT_EQ(verdict({a, b}), "");
  a = call(Collective::kBarrier, 1, 0);
  b = call(Collective::kBarrier, 2, 1);
  b.dtype = DType::kInt8;
  EXPECT_EQ(verdict({a, b}), "") << "barriers carry nothing";
  a = all_reduce();
  a.root = 1;
  EXPECT_EQ(verdict({a, all_reduce()}), "");
}

TEST(Description, uneven_gathers_may_contribute_different_counts) {
  Description a = call(Collective::kAllGather, 3), b = call(Collective::kAllGather, 5);
  EXPECT_TRUE(contains(verdict({a, b}), "the number of elements differs"));
  a.flags = b.flags = Description::kUneven;
  EXPECT_EQ(verdict({a, b}), "");
  a.output_count = 1;  // a digest of the sizes, which all ranks must share
  EXPECT_TRUE(contains(verdict({a, b}), "the list of sizes differs"));
  a.output_count = 0;
  b.dtype = DType::kInt32;
  EXPECT_TRUE(contains(verdict({a, b}), "the dtype differs"));
}

TEST(Description, an_even_and_an_uneven_call_can_be_told_apart_in_the_message) {
  Description even = call(Collective::kAllGather), uneven = even;
  uneven.flags = Description::kUneven;
  const std::string message = verdict({even, uneven});
  EXPECT_TRUE(contains(message, "the form of the call differs"));
  EXPECT_TRUE(contains(message, "rank 0 called all_gather(float32, count=3)"));
  EXPECT_TRUE(contains(message, "rank 1 called all_gather(float32, count=3, uneven)"));
}

TEST(Description, a_rejected_call_stops_all_ranks_and_says_why) {
  Description rejected = call(Collective::kRejected);
  rejected.set_note("all_reduce: sparse tensors are not supported");
  for (const std::vector<Description>& calls :
       {std::vector{all_reduce(), rejected}, std::vector{rejected, all_reduce()},
        std::vector{rejected, rejected}}) {
    const std::string message = check_compatible(calls);
    EXPECT_TRUE(contains(message, "made a rejected call: all_reduce: sparse tensors are not supported"));
    EXPECT_TRUE(contains(message, "No data was exchanged"));
  }
}

TEST(Description, the_verdict_is_one_on_all_ranks_whatever_their_number) {
  std::vector<Description> calls(300, all_reduce());
  EXPECT_EQ(check_compatible(calls), "");
  calls[299].count = 4;
  EXPECT_TRUE(contains(check_compatible(calls), "rank 299 called all_reduce(float32, count=4, op=sum)"));
}

TEST(Description, compressed_buckets_say_how_they_are_coded) {
  Description int8 = call(Collective::kCompressedAllReduce, 1000);
  int8.output_count = 7;
  int8.set_note("int8, block=256");
  Description fp8 = int8;
  fp8.output_count = 9;
  fp8.set_note("fp8_e4m3, block=256");
  EXPECT_EQ(verdict({int8, int8}), "");
  const std::string message = verdict({int8, fp8, int8});
  EXPECT_TRUE(contains(message, "how the elements are coded differs"));
  EXPECT_TRUE(
      contains(message, "ranks 0 and 2 called compressed_all_reduce(float32, int8, block=256, count=1000"));
  EXPECT_TRUE(
      contains(message, "rank 1 called compressed_all_reduce(float32, fp8_e4m3, block=256, count=1000"));
}

TEST(Description, long_notes_are_cut_between_characters) {
  Description d = call(Collective::kRejected);
  for (std::size_t length = 0; length < 300; ++length) {
    d.set_note(std::string(length, 'x'));
    EXPECT_EQ(std::string(d.note), std::string(std::min<std::size_t>(length, 191), 'x'));
  }
  d.set_note(std::string(190, 'x') + "é");  // two bytes, of which one has room
  EXPECT_EQ(std::string(d.note), std::string(190, 'x'));
  d.set_note(std::string(189, 'x') + "é");
  EXPECT_EQ(std::string(d.note), std::string(189, 'x') + "é");
  Description same = d;
  same.validate();
  EXPECT_EQ(std::memcmp(&d, &same, sizeof(d)), 0);
}

TEST(Description, validate_leaves_well_formed_text_alone) {
  const std::string text = "naïve – 漢字 😀 \xc2\x80";
  Description d = call(Collective::kRejected);
  d.set_note(text);
  d.validate();
  EXPECT_EQ(std::string(d.note), text);
}

TEST(Description, validate_replaces_what_is_not_utf8) {
  const auto validated = [](const std::string& bytes) {
    Description d = call(Collective::kRejected);
    std::memcpy(d.note, bytes.data(), bytes.size());
    d.validate();
    return std::string(d.note);
  };
  EXPECT_EQ(validated("a\nb\x7f\x1b[0m"), "a?b??[0m");
  EXPECT_EQ(validated("\x80\xff\xc0\xaf"), "????");
  EXPECT_EQ(validated("\xe2\x82"), "??") << "cut short";
  EXPECT_EQ(validated("\xe0\x9f\xbf"), "???") << "overlong";
  EXPECT_EQ(validated("\xed\xa0\x80"), "???") << "a surrogate";
  EXPECT_EQ(validated("\xf4\x90\x80\x80"), "????") << "beyond U+10FFFF";
  EXPECT_EQ(validated(std::string(192, 'x')), std::string(191, 'x')) << "not terminated";
  EXPECT_EQ(validated(std::string(189, 'x') + "\xe2\x82\xac"), std::string(189, 'x') + "??")
      << "cut by the end";
}

// A peer's bytes are a stranger's bytes.
TEST(Description, random_bytes_never_hurt) {
  std::mt19937_64 random(1);
  std::vector<Description> calls(4);
  for (int round = 0; round < 20000; ++round) {
    for (Description& d : calls) {
      unsigned char bytes[sizeof(Description)];
      for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
      // Sometimes plausible in front, so that all branches are reached.
      if (random() % 2 == 0) bytes[0] = static_cast<unsigned char>(random() % kCollectiveCount);
      std::memcpy(&d, bytes, sizeof(d));
      d.validate();
      ASSERT_LT(static_cast<int>(d.collective), kCollectiveCount);
      ASSERT_LT(static_cast<int>(d.dtype), kDTypeCount);
      ASSERT_LT(static_cast<int>(d.reduce_op), kReduceOpCount);
      ASSERT_EQ(d.note[sizeof(d.note) - 1], '\0');
      for (const char* c = d.note; *c != '\0'; ++c) {
        ASSERT_TRUE(static_cast<unsigned char>(*c) >= 0x20 && *c != 0x7f);
      }
      Description again = d;
      again.validate();
      ASSERT_EQ(std::memcmp(&d, &again, sizeof(d)), 0) << "validating twice changes something";
    }
    const std::string message = check_compatible(calls);
    ASSERT_FALSE(message.empty()) << "random calls cannot fit";
    ASSERT_LT(message.size(), 2000u);
    for (const Description& d : calls) ASSERT_TRUE(contains(message, d.to_string()));
  }
}

}  // namespace
}  // namespace fccl
