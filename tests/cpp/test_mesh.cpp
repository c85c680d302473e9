// The handshake against strangers, and records that a well-behaved rank could not have written.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

#include "common/error.h"
#include "cpu/environment.h"
#include "cpu/hello.h"
#include "cpu/mesh.h"
#include "cpu/node.h"
#include "cpu/tuning.h"

namespace fccl::cpu {
namespace {

using namespace std::chrono_literals;

// From the reference implementation's test vectors: key 00..0f, message 00..0e (Appendix A of the paper).
TEST(SipHash, MatchesThePublishedVector) {
  unsigned char message[15];
  for (unsigned char i = 0; i < 15; ++i) message[i] = i;
  EXPECT_EQ(siphash({0x0706050403020100ULL, 0x0f0e0d0c0b0a0908ULL}, message, sizeof(message)),
            0xa129ca6149be45e5ULL);
}

Descriptor connect_to(const std::string& name) {
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  return socket;
}

// Runs the handshake of `names.size()` ranks as threads of this process.
std::vector<std::vector<Connection>> mesh(const std::vector<Listener>& listeners,
                                          const std::vector<SipKey>& tokens,
                                          std::chrono::milliseconds timeout,
                                          std::vector<std::string>* errors) {
  std::vector<std::string> names;
  for (const Listener& listener : listeners) names.push_back(listener.name());
  std::vector<std::vector<Connection>> results(names.size());
  errors->assign(names.size(), "");
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < names.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        results[rank] = connect_mesh(listeners[rank], names, static_cast<int>(rank), tokens[rank],
                                     Deadline::after(timeout), [] {});
      } catch (const Error& error) {
        (*errors)[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(Mesh, ConnectsEveryPairDespiteStrangers) {
  const std::vector<Listener> listeners(4);
  // Strangers come first: silent ones, one that sends rubbish, one that claims to be rank 3 without
  // knowing the token, one that hangs up.
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 10; ++i) strangers.push_back(connect_to(listeners[0].name()));
  ASSERT_GT(::send(strangers[0].get(), "rubbish", 7, 0), 0);
  const std::uint32_t claim[4] = {3, 0, 12345, 0};
  ASSERT_GT(::send(strangers[1].get(), claim, sizeof(claim), 0), 0);
  const std::uint64_t guess = 42;
  ASSERT_GT(::send(strangers[1].get(), &guess, sizeof(guess), 0), 0);
  strangers[2].reset();

  std::vector<std::string> errors;
  const auto start = std::chrono::steady_clock::now();
  const auto results = mesh(listeners, std::vector<SipKey>(4, SipKey{1, 2}), 10s, &errors);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 3s) << "a silent stranger stalled the handshake";
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(errors[rank], "");
    for (std::size_t peer = 0; peer < 4; ++peer) {
      EXPECT_EQ(static_cast<bool>(results[rank][peer].socket), rank != peer);
    }
  }
}

TEST(Mesh, ARankWithAnotherTokenStaysOut) {
  const std::vector<Listener> listeners(2);
  std::vector<std::string> errors;
  mesh(listeners, {SipKey{1, 2}, SipKey{1, 3}}, 500ms, &errors);
  EXPECT_NE(errors[1].find("does not know this group's token"), std::string::npos) << errors[1];
  EXPECT_NE(errors[0].find("did not connect in time: 1"), std::string::npos) << errors[0];
}

TEST(Mesh, MissingRanksAreNamed) {
  const std::vector<Listener> listeners(3);
  std::vector<std::string> names;
  for (const Listener& listener : listeners) names.push_back(listener.name());
  try {
    connect_mesh(listeners[0], names, 0, {1, 2}, Deadline::after(100ms), [] {});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    EXPECT_NE(std::string(error.what()).find("1, 2"), std::string::npos) << error.what();
  }
}

std::vector<Hello> good_hellos(int ranks) {
  std::vector<Hello> hellos(static_cast<std::size_t>(ranks));
  for (Hello& hello : hellos) {
    hello.process = {random_u64(), random_u64()};
    hello.network_namespace = 5;
    hello.geometry = geometry_for(ranks);
    std::strcpy(hello.boot_id, "a machine");
  }
  return hellos;
}

TEST(Hello, RanksOfOneMachineShare) { EXPECT_EQ(why_not_shared(good_hellos(4)), ""); }

TEST(Hello, OtherMachinesNamespacesAndRefusalsAreNamed) {
  auto hellos = good_hellos(3);
  std::strcpy(hellos[2].boot_id, "another machine");
  EXPECT_EQ(why_not_shared(hellos), "ranks 0 and 2 run on different machines");
  hellos = good_hellos(3);
  hellos[1].network_namespace = 6;
  EXPECT_NE(why_not_shared(hellos).find("ranks 0 and 1 run in different network namespaces"),
            std::string::npos);
  hellos = good_hellos(3);
  std::strcpy(hellos[1].refusal, "no memory");
  EXPECT_EQ(why_not_shared(hellos), "rank 1: no memory");
  hellos = good_hellos(2);
  hellos[1].process = hellos[0].process;
  EXPECT_NE(why_not_shared(hellos).find("are one process"), std::string::npos);
}

TEST(Hello, ImpossibleGeometryIsRefused) {
  const auto refused = [](auto change) {
    auto hellos = good_hellos(2);
    change(hellos[0].geometry);
    hellos[1].geometry = hellos[0].geometry;
    return !why_not_shared(hellos).empty();
  };
  EXPECT_TRUE(refused([](Geometry& g) { g.chunk_bytes = 0; }));
  EXPECT_TRUE(refused([](Geometry& g) { g.chunk_bytes = 0xffffffff; }));
  EXPECT_TRUE(refused([](Geometry& g) { g.piece_bytes = g.chunk_bytes; }));
  EXPECT_TRUE(refused([](Geometry& g) { g.one_shot_bytes += 1; }));
  EXPECT_TRUE(refused([](Geometry& g) { g.depth = 0; }));
  EXPECT_TRUE(refused([](Geometry& g) { g.depth = 1000000; }));
  // A rank's share of a chunk would not fit into its result slot.
  EXPECT_TRUE(refused([](Geometry& g) { g.piece_bytes = 1024; }));
  EXPECT_TRUE(refused([](Geometry& g) { g.chunk_bytes *= 2; }));
}

TEST(Hello, GeometryIsEverybodysOrNobodys) {
  auto hellos = good_hellos(3);
  hellos[2].geometry.depth = 1;  // well-formed, and not enough for the pipelines
  EXPECT_EQ(why_not_shared(hellos), "ranks 0 and 2 lay out their shared memory differently");
}

TEST(Hello, RecordsOfOtherBuildsAreRefused) {
  const std::string good = good_hellos(1)[0].to_bytes();
  EXPECT_NO_THROW(Hello::parse(good, 0));
  EXPECT_THROW(Hello::parse("", 0), Error);
  EXPECT_THROW(Hello::parse(good.substr(1), 0), Error);
  EXPECT_THROW(Hello::parse(good + "x", 0), Error);
  std::string other = good;
  other[0] ^= 1;
  EXPECT_THROW(Hello::parse(other, 0), Error);
  // Text fields that are not terminated.
  std::string garbage = good;
  for (std::size_t i = offsetof(Hello, boot_id); i < garbage.size(); ++i) garbage[i] = 'x';
  const Hello parsed = Hello::parse(garbage, 0);
  EXPECT_EQ(std::strlen(parsed.boot_id), sizeof(parsed.boot_id) - 1);
  EXPECT_EQ(std::strlen(parsed.refusal), sizeof(parsed.refusal) - 1);
}

// Two nodes of this process, joined by real sockets: descriptors find their group whatever the order.
TEST(Node, DescriptorsForOtherGroupsAreKept) {
  int pair[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
  const std::vector<ProcessId> members = {{1, 1}, {2, 2}};
  const auto make = [&](int self, int fd) {
    std::vector<Connection> connections(2);
    connections[static_cast<std::size_t>(1 - self)].socket = Descriptor(fd);
    return std::make_unique<Node>(7, self, members, std::move(connections));
  };
  auto a = make(0, pair[0]);
  const auto b = make(1, pair[1]);
  EXPECT_EQ(a->index_of({2, 2}), 1);
  EXPECT_EQ(a->index_of({3, 3}), -1);

  const Segment one = Segment::create(4096);
  const Segment two = Segment::create(8192);
  a->send_descriptor(1, 100, one.descriptor());
  a->send_descriptor(1, 200, two.descriptor());
  const Deadline deadline = Deadline::after(2s);
  EXPECT_NO_THROW(Segment::open(b->receive_descriptor(0, 200, deadline, [] {}), 8192));
  EXPECT_NO_THROW(Segment::open(b->receive_descriptor(0, 100, deadline, [] {}), 4096));
  EXPECT_THROW(b->receive_descriptor(0, 300, Deadline::after(50ms), [] {}), Error) << "nothing was sent";
  ASSERT_EQ(::send(pair[0], "hello", 5, 0), 5);
  EXPECT_THROW(b->receive_descriptor(0, 300, deadline, [] {}), Error) << "rubbish";

  EXPECT_FALSE(b->is_gone(0));
  a.reset();
  EXPECT_TRUE(b->is_gone(0));
  EXPECT_THROW(b->receive_descriptor(0, 300, deadline, [] {}), Error) << "closed";
}

}  // namespace
}  // namespace fccl::cpu
