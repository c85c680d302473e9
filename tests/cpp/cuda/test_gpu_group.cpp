// Groups of GPUs from their making to their end, on fakes of the GPU (fake_gpus.h): results, the joint way
// out of whatever goes wrong on one rank, order between streams and engines, graphs.
#include "cuda/gpu_group.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "cuda/gpu_world.h"

namespace fccl::cuda {
namespace {

using host::all_reduce_of;
using host::Fails;
using host::Group;
using host::Log;
using host::on_all_ranks;
using host::Quiet;
using host::Rank;
using host::run;
using host::stream;

// ---- results ----

TEST(GpuGroup, collectives_are_right) {
  for (const auto kind : {Export::Kind::kDescriptor, Export::Kind::kIpcHandle}) {
    for (const int size : {2, 3, 8}) {
      Group world(size);
      for (Rank& rank : world.ranks) rank.gpu->kind = kind;
      world.connect();
      on_all_ranks(size, [&](int r) {
        ASSERT_NE(world[r].group, nullptr) << world[r].why_not;
        GpuGroup& group = *world[r].group;
        const float sum = static_cast<float>(size * (size + 1) / 2);
        for (const std::size_t count : {1u, 100u, 3000u}) {
          std::vector<float> values(count, static_cast<float>(r + 1));
          run(group, all_reduce_of(count), values.data(), values.data());
          EXPECT_EQ(values, std::vector<float>(count, sum));
          std::fill(values.begin(), values.end(), static_cast<float>(r + 1));
          run(group, all_reduce_of(count, DType::kFloat32, ReduceOp::kAvg), values.data(), values.data());
          EXPECT_EQ(values, std::vector<float>(count, sum / static_cast<float>(size)));

          // A type without a kernel of its own, of an odd number of bytes.
          std::vector<std::uint8_t> bytes(count, static_cast<std::uint8_t>(r));
          const GpuCall broadcast{Collective::kBroadcast, ReduceOp::kSum, DType::kUInt8, size - 1, count};
          run(group, broadcast, nullptr, bytes.data());
          EXPECT_EQ(bytes, std::vector<std::uint8_t>(count, static_cast<std::uint8_t>(size - 1)));

          std::vector<std::int64_t> own(count, r);
          std::vector<std::int64_t> gathered(count * static_cast<std::size_t>(size), -1);
          const GpuCall gather{Collective::kAllGather, ReduceOp::kSum, DType::kInt64, 0, count};
          run(group, gather, own.data(), gathered.data());
          for (std::size_t i = 0; i < gathered.size(); ++i)
            ASSERT_EQ(gathered[i], static_cast<std::int64_t>(i / count));
        }
        EXPECT_FALSE(group.failure().has_value());
        EXPECT_EQ(group.launch_counts(),
                  (std::map<std::string, std::int64_t>{
                      {"one-shot all_reduce", 6}, {"broadcast", 3}, {"one-shot all_gather", 3}}));
      });
      world.close();
      world.expect_nothing_left();
    }
  }
}

// ---- terms ----

TEST(GpuGroup, minima_hold) {
  Group world(3);
  world[2].gpu->link = Link::kPcie;
  world.connect([](int rank, GpuGroupConfig& config) {
    config.half_bytes = rank == 1 ? 100'008 : 1 << 20;
    config.deterministic = rank != 0;
    config.float32_accumulation = true;
  });
  for (Rank& rank : world.ranks) {
    ASSERT_NE(rank.group, nullptr) << rank.why_not;
    const Terms& terms = rank.group->terms();
    EXPECT_EQ(terms.half_bytes, 100'000u);
    EXPECT_EQ(terms.link, Link::kPcie);
    EXPECT_EQ(terms.sm_count, 4);
    EXPECT_EQ(terms.architecture, 90);
    EXPECT_FALSE(terms.deterministic);
    EXPECT_TRUE(terms.float32_accumulation);
  }
  world.close();
}

// Whatever fails, and wherever: no rank uses the kernels, all say the same, and nothing is left over.
TEST(GpuGroup, one_rank_that_cannot_is_enough) {
  const std::pair<Fails, const char*> kFaults[] = {
      {Fails::kFacts, "rank 1: no device"},
      {Fails::kLink, "the GPU of rank 1 cannot reach that of rank 0"},
      {Fails::kAllocate, "rank 1: no memory on the device"},
      {Fails::kLoad, "rank 1: no such kernel image"},
      {Fails::kMap, "rank 1: peer access is not supported"},
  };
  for (const auto& [fails, why] : kFaults) {
    for (const auto kind : {Export::Kind::kDescriptor, Export::Kind::kIpcHandle}) {
      Group world(3);
      for (Rank& rank : world.ranks) rank.gpu->kind = kind;
      world[1].gpu->fails = fails;
      world.connect();
      for (Rank& rank : world.ranks) {
        EXPECT_EQ(rank.group, nullptr);
        EXPECT_EQ(rank.why_not, why);
      }
      world.expect_nothing_left();
    }
  }
}

TEST(GpuGroup, a_link_must_prove_itself) {
  Group world(2);
  world.connect([](int rank, GpuGroupConfig& config) {
    config.prove = [rank](const Terms& terms, std::span<const RankTerms> ranks) {
      EXPECT_EQ(ranks.size(), 2u);
      EXPECT_EQ(terms.link, Link::kNvlink);
      return rank == 1 ? std::string("stores to rank 0 did not arrive") : std::string();
    };
  });
  for (Rank& rank : world.ranks) {
    EXPECT_EQ(rank.group, nullptr);
    EXPECT_EQ(rank.why_not, "rank 1: stores to rank 0 did not arrive");
  }
  world.expect_nothing_left();
}

// A machine with one GPU can try the kernels too, if all ranks say that they may share it.
TEST(GpuGroup, ranks_share_a_gpu_if_all_let_them) {
  for (const int unwilling : {-1, 0, 2}) {
    Group world(3);
    for (Rank& rank : world.ranks) {
      rank.gpu->gpu = 5;
      rank.gpu->link = Link::kNone;  // what a driver says of a GPU and itself
    }
    world.connect([&](int rank, GpuGroupConfig& config) { config.may_share_gpu = rank != unwilling; });
    if (unwilling >= 0) {
      for (Rank& rank : world.ranks) {
        EXPECT_EQ(rank.group, nullptr);
        EXPECT_EQ(rank.why_not, "rank 0 and rank 1 share one GPU");
      }
      continue;
    }
    on_all_ranks(3, [&](int r) {
      ASSERT_NE(world[r].group, nullptr) << world[r].why_not;
      EXPECT_EQ(world[r].group->terms().link, Link::kNvlink);
      std::vector<float> values(100, static_cast<float>(r));
      run(*world[r].group, all_reduce_of(100), values.data(), values.data());
      EXPECT_EQ(values, std::vector<float>(100, 3.0f));
    });
    world.close();
    world.expect_nothing_left();
  }
}

// Two of three ranks share one, and the driver is asked for the third.
TEST(GpuGroup, ranks_that_share_a_gpu_still_need_links_to_the_others) {
  Group world(3);
  world[0].gpu->gpu = 5;
  world[1].gpu->gpu = 5;
  world[1].gpu->link = Link::kNone;
  world.connect([](int, GpuGroupConfig& config) { config.may_share_gpu = true; });
  for (Rank& rank : world.ranks) {
    EXPECT_EQ(rank.group, nullptr);
    EXPECT_EQ(rank.why_not, "the GPU of rank 1 cannot reach that of rank 2");
  }
  world.expect_nothing_left();
}

TEST(GpuGroup, ranks_export_in_one_way) {
  Group world(2);
  world[1].gpu->kind = Export::Kind::kIpcHandle;
  world.connect();
  for (Rank& rank : world.ranks) {
    EXPECT_EQ(rank.group, nullptr);
    EXPECT_EQ(rank.why_not,
              "rank 0: rank 1 exports its workspace in another way than this rank, or another size");
  }
  world.expect_nothing_left();
}

TEST(GpuTerms, say_why_not) {
  std::vector<RankTerms> ranks(3);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    ranks[r].device.uuid[0] = static_cast<unsigned char>(r);
    ranks[r].half_bytes = 1024;
    for (Link& link : ranks[r].links) link = Link::kNvlink;
  }
  EXPECT_TRUE(settle(ranks).usable) << settle(ranks).why_not;
  auto changed = ranks;
  changed[2].device.uuid = ranks[0].device.uuid;
  EXPECT_EQ(settle(changed).why_not, "rank 0 and rank 2 share one GPU");
  changed = ranks;
  changed[1].protocol = 77;
  EXPECT_NE(settle(changed).why_not.find("rank 1 has version 77"), std::string::npos);
  changed = ranks;
  changed[1].refuse(std::string(500, 'x'));
  EXPECT_EQ(settle(changed).why_not.size(), std::string("rank 1: ").size() + sizeof(RankTerms::why) - 1);
  changed = ranks;
  std::memset(changed[1].why, 0xff, sizeof(changed[1].why));  // a stranger's bytes
  changed[1].usable = 7;
  EXPECT_FALSE(settle(changed).usable);
  EXPECT_EQ(settle(changed).why_not.find('\xff'), std::string::npos);
  EXPECT_NE(settle(std::vector<RankTerms>(9)).why_not.find("9 ranks"), std::string::npos);
  EXPECT_FALSE(settle(std::vector<RankTerms>(1)).usable);
  changed = ranks;
  changed[0].half_bytes = 15;  // less than one vector
  EXPECT_FALSE(settle(changed).usable);
}

TEST(GpuCallWord, comes_back) {
  for (const Collective collective :
       {Collective::kAllReduce, Collective::kAllGather, Collective::kBroadcast}) {
    for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
      for (int op = 0; op < kReduceOpCount; ++op) {
        for (const std::uint64_t count : {std::uint64_t{0}, std::uint64_t{1}, GpuCall::kCountLimit - 1}) {
          const GpuCall call{collective, static_cast<ReduceOp>(op), static_cast<DType>(dtype), op, count};
          const GpuCall back = GpuCall::unpack(call.pack());
          EXPECT_EQ(back.pack(), call.pack());
          EXPECT_EQ(back.to_string(), call.to_string());
          EXPECT_EQ(back.count, count);
        }
      }
    }
  }
  EXPECT_EQ(all_reduce_of(3).to_string(), "all_reduce(float32, count=3, op=sum)");
  EXPECT_NE(all_reduce_of(3).pack(), all_reduce_of(4).pack());
  GpuCall::unpack(~std::uint64_t{0}).to_string();  // a stranger's
}

// ---- order ----

TEST(GpuOrder, a_call_on_another_stream_waits_for_the_one_before) {
  Quiet world;
  world.call(1);
  world.call(1);
  EXPECT_EQ(world.take_log(), (Log{"one-shot all_reduce on 1", "record 101 on 1", "one-shot all_reduce on 1",
                                   "record 101 on 1"}));
  world.call(2);
  EXPECT_EQ(world.take_log(), (Log{"2 waits for 101", "one-shot all_reduce on 2", "record 101 on 2"}));
}

TEST(GpuOrder, the_inner_engine_takes_its_turn) {
  Quiet world;
  world.call(1);
  world.take_log();
  world.group().enter_inner(stream(2));  // synchronous: on the caller's stream
  world.gpu().log.push_back("inner on 2");
  world.group().leave_inner(stream(2));
  world.call(1);
  EXPECT_EQ(world.take_log(), (Log{"2 waits for 101", "inner on 2", "record 101 on 2", "1 waits for 101",
                                   "one-shot all_reduce on 1", "record 101 on 1"}));
  world.group().enter_inner(stream(3));  // asynchronous: another stream waits for its end
  world.group().leave_inner(stream(4));
  world.call(1);
  EXPECT_EQ(world.take_log(), (Log{"3 waits for 101", "record 101 on 4", "1 waits for 101",
                                   "one-shot all_reduce on 1", "record 101 on 1"}));
}

// ---- graphs ----

TEST(GpuGraphs, without_a_workspace_of_their_own_the_inner_engine_is_used) {
  Quiet world;
  world.gpu().captures[stream(5)] = 1;
  const LaunchPlan plan = world.group().plan(all_reduce_of(4), stream(5));
  EXPECT_EQ(plan.algorithm, Algorithm::kInner);
  EXPECT_NE(std::string(plan.reason).find("warm_up"), std::string::npos);
  EXPECT_NE(world.group().plan(all_reduce_of(4), stream(1)).algorithm, Algorithm::kInner);
}

TEST(GpuGraphs, have_a_workspace_and_an_order_of_their_own) {
  Quiet world;
  world.call(1);
  const std::byte* const eager = world.gpu().last_session.workspace[0];
  on_all_ranks(2, [&](int r) {
    world[r].group->warm_up(*world[r].peers);
    world[r].group->warm_up(*world[r].peers);  // once is enough
  });
  EXPECT_TRUE(world.group().is_warm());
  EXPECT_EQ(world.gpu().allocations, 2);
  world.take_log();
  world.gpu().captures = {{stream(5), 1}, {stream(6), 1}};
  world.call(5);
  EXPECT_NE(world.gpu().last_session.workspace[0], eager);
  EXPECT_NE(world.gpu().last_session.status, nullptr);
  world.call(6);
  world.gpu().captures = {};
  world.call(1);  // goes on where the eager calls were
  EXPECT_EQ(world.gpu().last_session.workspace[0], eager);
  world.gpu().captures = {{stream(6), 2}};
  world.call(6);  // another graph: nothing to wait for
  EXPECT_EQ(world.take_log(), (Log{"one-shot all_reduce on 5", "record 102 on 5", "6 waits for 102",
                                   "one-shot all_reduce on 6", "record 102 on 6", "one-shot all_reduce on 1",
                                   "record 101 on 1", "one-shot all_reduce on 6", "record 102 on 6"}));
  world.gpu().captures = {};
  world.close();
  // The graph has the workspace for good; on the other rank, which captured nothing, it went.
  EXPECT_EQ(world.gpu().allocations, 1);
  EXPECT_EQ(world[1].gpu->allocations, 0);
}

TEST(GpuGraphs, warm_up_fails_on_all_ranks_or_on_none) {
  for (const Fails fails : {Fails::kAllocate, Fails::kMap}) {
    Quiet world;
    world[1].gpu->fails = fails;
    on_all_ranks(2, [&](int r) {
      try {
        world[r].group->warm_up(*world[r].peers);
        ADD_FAILURE() << "rank " << r << " is warm";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("no workspace for graphs: rank 1: "), std::string::npos);
      }
      EXPECT_FALSE(world[r].group->is_warm());
    });
    world[1].gpu->fails = Fails::kNothing;
    world.call(1);
  }
}

}  // namespace
}  // namespace fccl::cuda
