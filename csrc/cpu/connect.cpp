// How a group finds its peers and maps their memory.
//
//   1. hello   every rank publishes a record through the Store and reads all of them; all conclude the
//              same from the same records (hello.h): share memory or not, over which node object.
//   2. mesh    unless an earlier group's node holds all ranks: connect to one another (mesh.h).
//   3. ready   every rank makes its segment and says whether all went well.
//   4. mapped  descriptors are passed, segments mapped, and every rank says whether that went well.
//
// After 1, 3 and 4 all ranks have the same words before them, so they decide alike: all use the engine,
// or none does and why_not() says why. It is a transaction: a rank's trouble is published, never thrown
// half-way, and a rank that waits for a peer in the middle of a step looks for what the peer has published
// meanwhile. A rank that gives up altogether (its deadline, an abort, Ctrl-C) publishes that too.
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>

#include "common/text.h"
#include "cpu/environment.h"
#include "cpu/group_state.h"
#include "cpu/interrupt.h"
#include "cpu/point_to_point.h"
#include "cpu/tuning.h"

namespace fccl::cpu {

namespace {

class Connector {
 public:
  Connector(Group::State& state, const Deadline& deadline) : state_(state), deadline_(deadline) {}

  // Empty if all went well on all ranks, else the joint reason why not.
  std::string run() {
    const std::vector<Hello> hellos = exchange_hellos();
    std::string why = why_not_shared(hellos);
    if (!why.empty()) return why;
    state_.geometry = hellos[0].geometry;
    for (const Hello& hello : hellos) listens_at_.emplace_back(hello.socket_name);

    why = joint(kReady, attempt([&] {
                  join_node(hellos);
                  state_.own = Segment::reserve(state_.geometry.segment_bytes());
                  state_.own.allocate(0, state_.geometry.control_bytes());
                  new (state_.own.data()) Control();
                  for (int peer = 0; peer < ranks(); ++peer)
                    new (state_.own.data() + state_.geometry.lane_control_offset(peer)) LaneControl();
                }));
    if (!why.empty()) return why;

    std::string said = attempt([&] { map_peers(hellos[0].group_id); });
    // Whether arenas may be used is a joint decision, too.
    if (said == kFine && !state_.node->arenas_mapped()) said = kNoArenas + state_.node->why_no_arenas();
    return joint(kMapped, said);
  }

  // Tells peers that may be waiting for us that this rank has given up. Best effort.
  void give_up(const std::string& why) noexcept {
    try {
      for (const char* step : {kReady, kMapped}) {
        if (!done_[step == kMapped]) state_.config.store->set(key(step, state_.rank()), kGivenUp + why);
      }
    } catch (...) {
      // The store is gone, and the peers' deadlines will tell them.
    }
  }

  bool interrupted() const { return interrupted_; }

 private:
  static constexpr const char* kReady = "ready";
  static constexpr const char* kMapped = "mapped";
  static constexpr const char* kFine = "ok";
  static constexpr const char* kNoArenas = "ok, but no arenas: ";
  static constexpr const char* kGivenUp = "given up: ";

  static bool is_fine(const std::string& said) { return said == kFine || said.rfind(kNoArenas, 0) == 0; }

  int ranks() const { return state_.world_size(); }
  static std::string key(const std::string& step, int rank) { return step + "/" + std::to_string(rank); }

  void poll() {
    try {
      check_interrupt();
    } catch (...) {
      interrupted_ = true;  // not a step's trouble, whatever its type
      throw;
    }
    state_.throw_if_failed();
  }

  // While a step waits for peers: a peer that has published trouble with this step will not do its part.
  void poll_step(const char* step) {
    poll();
    const auto now = std::chrono::steady_clock::now();
    if (now < next_look_) return;
    next_look_ = now + std::chrono::milliseconds(100);
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer == state_.rank()) continue;
      const auto said = state_.config.store->try_get(key(step, peer));
      if (said && !is_fine(*said))
        throw Error(ErrorKind::kSystem, "rank " + std::to_string(peer) + " has trouble");
      if (!said && is_gone(step, peer)) throw Error(ErrorKind::kPeerDied, gone_message(step, peer));
    }
  }

  // Publishes our value and reads everybody's.
  std::vector<std::string> exchange(const std::string& step, const std::string& value) {
    KeyValueStore& store = *state_.config.store;
    store.set(key(step, state_.rank()), value);
    if (step != "hello") done_[step == kMapped] = true;
    std::vector<std::string> values(static_cast<std::size_t>(ranks()));
    std::chrono::microseconds pause(50);
    for (int peer = 0; peer < ranks();) {
      if (auto got = store.try_get(key(step, peer))) {
        values[static_cast<std::size_t>(peer++)] = std::move(*got);
        continue;
      }
      poll();
      if (deadline_.expired()) throw Error(ErrorKind::kTimeout, missing_message(step, peer));
      if (const auto now = std::chrono::steady_clock::now(); now >= next_probe_) {
        next_probe_ = now + std::chrono::milliseconds(100);
        if (is_gone(step, peer)) throw Error(ErrorKind::kPeerDied, gone_message(step, peer));
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(10000));
    }
    return values;
  }

  // Whether a rank that has said hello listens no more, without a word on this step. Probed first, looked
  // for its word after: it may have said it and gone on.
  bool is_gone(const std::string& step, int peer) {
    return !listens_at_.empty() && peer != state_.rank() &&
           !is_listening(listens_at_[static_cast<std::size_t>(peer)]) &&
           !state_.config.store->try_get(key(step, peer));
  }
  std::string gone_message(const std::string& step, int peer) const {
    return "fccl " + state_.where() + ": rank " + std::to_string(peer) +
           " ended while the group was set up (step '" + step + "'); that rank's output says why";
  }

  std::string missing_ranks(const std::string& step, int first) {
    std::string missing;
    for (int peer = first; peer < ranks(); ++peer) {
      if (state_.config.store->try_get(key(step, peer))) continue;
      missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(peer);
    }
    return missing.empty() ? "a rank" : missing;
  }

  std::string missing_message(const std::string& step, int first) {
    return "fccl " + state_.where() + ": timed out after " + std::to_string(deadline_.span().count()) +
           " ms while the group was set up: " + missing_ranks(step, first) + " did not come (step '" + step +
           "')";
  }

  std::vector<Hello> exchange_hellos() {
    Hello mine;
    mine.world_size = static_cast<std::uint32_t>(ranks());
    mine.process = this_process();
    mine.network_namespace = network_namespace();
    mine.group_id = random_u64();
    mine.token = {random_u64(), random_u64()};
    mine.geometry = geometry_for(ranks());
    if (state_.config.testing.depth != 0) mine.geometry.depth = state_.config.testing.depth;
    candidate_ = Node::newest();
    mine.node = candidate_ ? candidate_->id() : 0;
    mine.word = state_.config.word;
    if (const Arena* arena = Arena::of_process()) mine.arena_bytes = arena->capacity();
    copy_text(boot_id(), mine.boot_id);
    if (!shared_memory_enabled()) {
      copy_text("the environment variable FCCL_SHM turns shared memory off", mine.refusal);
    } else {
      try {
        listener_.emplace();
        copy_text(listener_->name(), mine.socket_name);
      } catch (const Error& error) {
        copy_text(error.what(), mine.refusal);
      }
    }
    const std::vector<std::string> values = exchange("hello", mine.to_bytes());
    std::vector<Hello> hellos;
    for (int peer = 0; peer < ranks(); ++peer) {
      hellos.push_back(Hello::parse(values[static_cast<std::size_t>(peer)], peer));
      state_.words.push_back(hellos.back().word);
    }
    return hellos;
  }

  // Uses the candidate if it is everybody's newest node and holds all of this group's ranks; its
  // membership is the same on all of them, so they agree. Else makes a node of this group's ranks.
  void join_node(const std::vector<Hello>& hellos) {
    bool usable = candidate_ != nullptr;
    for (const Hello& hello : hellos) {
      usable = usable && hello.node == candidate_->id() && candidate_->index_of(hello.process) >= 0;
    }
    if (!usable) {
      std::vector<std::string> names;
      std::vector<ProcessId> processes;
      for (const Hello& hello : hellos) {
        names.emplace_back(hello.socket_name);
        processes.push_back(hello.process);
      }
      std::vector<Connection> connections = connect_mesh(*listener_, names, state_.rank(), hellos[0].token,
                                                         deadline_, [this] { poll_step(kReady); });
      candidate_ = std::make_shared<Node>(hellos[0].group_id, state_.rank(), std::move(processes),
                                          std::move(connections));
      std::vector<std::uint64_t> arena_bytes;
      for (const Hello& hello : hellos) arena_bytes.push_back(hello.arena_bytes);
      candidate_->map_arenas(arena_bytes, deadline_, [this] { poll_step(kReady); });
      Node::publish(candidate_);
    }
    state_.node = candidate_;
    state_.group_id = hellos[0].group_id;
    for (const Hello& hello : hellos) state_.members.push_back(candidate_->index_of(hello.process));
  }

  void map_peers(std::uint64_t group) {
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer == state_.rank()) continue;
      state_.node->send_descriptor(member(peer), group, state_.own.descriptor());
    }
    std::vector<Segment> mapped(static_cast<std::size_t>(ranks()));
    std::vector<const std::byte*> segments;
    std::vector<const Control*> controls;
    for (int peer = 0; peer < ranks(); ++peer) {
      Segment& segment = mapped[static_cast<std::size_t>(peer)];
      if (peer != state_.rank()) {
        try {
          const Descriptor descriptor =
              state_.node->receive_descriptor(member(peer), group, deadline_, [this] { poll_step(kMapped); });
          segment = Segment::open(descriptor, state_.geometry.segment_bytes());
        } catch (const Error& error) {
          if (error.kind() == ErrorKind::kAborted) throw;
          throw Error(error.kind(), "rank " + std::to_string(peer) + ": " + error.what());
        }
      }
      const std::byte* data = peer == state_.rank() ? state_.own.data() : segment.data();
      segments.push_back(data);
      controls.push_back(reinterpret_cast<const Control*>(data));
    }
    {
      const std::lock_guard lock(state_.failure_mutex);
      state_.mapped = std::move(mapped);
      state_.segments = std::move(segments);
      state_.controls = std::move(controls);
    }
    // From here on a failure shows in our status line; one that came before must not be lost.
    state_.throw_if_failed();
  }

  int member(int rank) const { return state_.members[static_cast<std::size_t>(rank)]; }

  // Runs a step; its trouble, of whatever kind, becomes a text for the peers.
  template <typename Step>
  std::string attempt(Step&& step) {
    try {
      step();
      return kFine;
    } catch (const std::exception& error) {
      if (interrupted_ || state_.failed.load()) throw;
      return error.what();
    }
  }

  // Tells the others how a step went here; the first rank's trouble, if any has some.
  std::string joint(const char* step, const std::string& result) {
    std::vector<std::string> results = exchange(step, result);
    for (int pass = 0; pass < 2; ++pass) {  // a rank that has given up takes nobody to the inner engine
      for (std::size_t peer = 0; peer < results.size(); ++peer) {
        std::string& said = results[peer];
        const bool given_up = said.rfind(kGivenUp, 0) == 0;
        if (said.rfind(kNoArenas, 0) == 0 && state_.why_no_arenas.empty()) {
          const bool own = static_cast<int>(peer) == state_.rank();
          state_.why_no_arenas = (own ? "" : "rank " + std::to_string(peer) + ": ") +
                                 said.substr(std::string(kNoArenas).size(), 400);
          make_printable(state_.why_no_arenas.data(), state_.why_no_arenas.size() + 1);
        }
        if (is_fine(said) || given_up != (pass == 0)) continue;
        said.resize(std::min<std::size_t>(said.size(), 400));
        make_printable(said.data(), said.size() + 1);
        const std::string text = "rank " + std::to_string(peer) + ": " + said;
        if (given_up) {
          throw Error(ErrorKind::kPeerFailed,
                      "fccl " + state_.where() + ": the group could not be set up; " + text);
        }
        return text;
      }
    }
    return {};
  }

  Group::State& state_;
  const Deadline& deadline_;
  std::optional<Listener> listener_;
  std::shared_ptr<Node> candidate_;
  bool interrupted_ = false;
  bool done_[2] = {false, false};  // whether our word on kReady and kMapped is out
  std::chrono::steady_clock::time_point next_look_{};
  std::vector<std::string> listens_at_;  // by rank, once all have said hello
  std::chrono::steady_clock::time_point next_probe_{};
};

}  // namespace

bool Group::connect(const Deadline& deadline) {
  State& state = *state_;
  state.throw_if_failed();
  if (state.tried) return state.connected;
  state.generation = fork_generation();
  if (state.world_size() == 1) {
    state.tried = state.connected = true;
    return true;
  }
  Connector connector(state, deadline);
  try {
    state.why_not = connector.run();
  } catch (const Error& error) {
    connector.give_up(error.what());
    throw Error(state.fail(error));
  } catch (const std::exception& caught) {  // the Store's, or Ctrl-C
    const Error error =
        connector.interrupted()
            ? Error(ErrorKind::kInterrupted, "fccl " + state.where() + " was interrupted while it connected")
            : Error(ErrorKind::kSystem,
                    "fccl " + state.where() + ": the group could not be set up: " + caught.what());
    connector.give_up(error.what());
    state.fail(error);
    throw;
  }
  state.tried = true;
  if (state.why_not.empty()) {
    // What decides whether spinning pays is how many ranks share the machine, not how many this group has.
    state.waiter.emplace(&state.control().park, state.node->size());
    state.point_to_point = std::make_unique<PointToPoint>(state);
    state.connected = true;
  } else {
    const std::lock_guard lock(state.failure_mutex);
    state.node.reset();
    state.controls.clear();
    state.segments.clear();
    state.mapped.clear();
    state.own = Segment();
  }
  return state.connected;
}

std::string why_no_shared_memory() {
  if (!shared_memory_enabled()) return "the environment variable FCCL_SHM turns shared memory off";
  try {
    const Listener listener;
    const Segment segment = Segment::create(1 << 16);
    const Segment mapped = Segment::open(segment.descriptor(), segment.size());
    segment.data()[0] = std::byte{1};
    if (mapped.data()[0] != std::byte{1}) return "two mappings of one memfd differ";
    const std::vector<std::string> names = {listener.name()};
    const Node alone(random_u64(), 0, {this_process()},
                     connect_mesh(listener, names, 0, {}, Deadline(), [] {}));
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace fccl::cpu
