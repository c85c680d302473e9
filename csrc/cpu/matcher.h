// Which message goes into which receive, and the moving of them. Not thread-safe, and never waits: see
// point_to_point.h for that.
//
// A message is matched with a receive by (source, tag), in the order in which messages were sent and receives
// were posted. It takes no number in the group's order of collectives. How it travels:
//
//   - eager (short): behind its record in the ring. The send is done when it is there. If nobody has posted a
//     receive for it yet, the receiver keeps a copy; it says how much it keeps, and above a limit the sender
//     offers short messages, too.
//   - in the sender's arena: offered by its place. The receiver fetches it and says so (kTaken).
//   - else offered without a place. Once it is matched the receiver says kGo, and the sender passes it chunk
//     by chunk through the lane's slots, message after message in the order of the kGo's; so both sides know
//     what each chunk is part of.
//
// A receiver may be fetching a message out of the sender's arena while the sender fails or leaves, who
// then may write to it: sender: status = failed or left; write. Receiver: fetch; look at the status. If it
// has fetched what was written later, it sees the status as well, and does not take the message for a good
// one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "cpu/group_state.h"
#include "cpu/lane.h"

namespace fccl::cpu {

// One send or receive.
struct Request {
  bool sends = false;
  std::byte* data = nullptr;  // of a send: only read
  std::size_t count = 0;
  DType dtype = DType::kBytes;
  int peer = -1;  // -1: a receive from any rank; when it is done, the rank that it came from
  std::int64_t tag = 0;
  // Called once when it has ended, just before done(); must not throw.
  std::function<void(const Request&)> at_end;

  std::optional<Error> error;  // valid once done()
  bool done() const noexcept { return is_done.load(); }

  std::size_t bytes() const noexcept { return count * size_of(dtype); }

  // ---- the matcher's ----
  std::size_t moved = 0;
  bool ended = false;
  std::atomic<bool> is_done{false};
};
using RequestPtr = std::shared_ptr<Request>;

class Matcher {
 public:
  explicit Matcher(Group::State& state);

  void post(const RequestPtr& request);
  // Moves what can be moved now, a bounded amount of it; false if that was nothing. Throws kSystem if a
  // peer's words make no sense.
  bool progress();
  // Takes a receive back that no message has been found for yet; false if there is one.
  bool withdraw(const RequestPtr& request);
  // Ends every request with `error`.
  void fail_all(const Error& error);
  // Requests that have ended since the last call.
  std::vector<RequestPtr> take_ended() { return std::exchange(ended_, {}); }

  // Whether there is anything to be done, with anybody; with `peer` in particular, of which a receive from
  // any rank is no part.
  bool is_busy() const;
  bool is_busy_with(int peer) const;
  bool receives_from_any() const { return from_any_ != 0; }
  // Whether it is a receive that no message has been found for.
  bool is_unmatched(const Request& request) const;
  bool has_requests_with(int peer) const { return at(peer).requests != 0; }
  // Whether there are sends, or answers to peers, that have not gone out.
  bool has_something_to_say() const;
  void forget_answers(int peer) { at(peer).queue.clear(); }
  Lane& lane(int peer);

  // "recv(float32, count=3, tag=0) from rank 1".
  static std::string describe(const Request& request);
  // For messages of errors: what has come from whom and waits for a receive; which requests need `rank`.
  // Empty if nothing.
  std::string describe_unmatched() const;
  std::string describe_requests_with(int rank) const;

 private:
  struct Outgoing {
    Record record;
    RequestPtr request;  // of an eager message
  };
  struct Unmatched {
    std::uint64_t order;  // of arrival, over all peers
    Record record;
    std::vector<std::byte> message;
  };
  struct Fetch {
    RequestPtr request;
    const std::byte* from;
    std::uint64_t id;
  };
  struct Peer {
    std::optional<Lane> lane;
    std::size_t requests = 0;  // that have not ended
    std::uint64_t next_id = 1;
    std::deque<Outgoing> queue;  // records for which the ring had no room yet
    std::map<std::uint64_t, RequestPtr> offered;
    std::deque<RequestPtr> staging;     // sends that were asked for, in that order
    std::deque<Unmatched> unmatched;    // in the order of arrival
    std::uint64_t kept = 0;             // bytes of messages in there
    std::deque<RequestPtr> collecting;  // receives that asked for their message, in that order
    std::deque<Fetch> fetching;
  };

  void post_send(const RequestPtr& request);
  void post_receive(const RequestPtr& request);
  bool step(int peer);
  bool drain(int peer);
  bool stage(Peer& peer);
  bool collect(Peer& peer);
  bool fetch(int rank, Peer& peer);
  bool flush(Peer& peer);
  void arrived(int rank, const Record& record, const std::byte* message);
  void accept(int rank, const Record& record, const std::byte* message, const RequestPtr& request);
  void answer(Peer& peer, RecordKind kind, const Record& record);
  RequestPtr take_offer(int rank, std::uint64_t id);
  void keep(Peer& peer, std::int64_t bytes);
  void end(const RequestPtr& request, std::optional<Error> error = std::nullopt);
  Peer& at(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& at(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  std::string place() const;

  Group::State& state_;
  std::vector<Peer> peers_;
  std::list<RequestPtr> receives_;  // not matched yet, in the order they were posted
  std::size_t from_any_ = 0;        // how many of them are from any rank
  std::size_t sends_ = 0;           // that have not ended
  std::uint64_t arrivals_ = 0;
  std::vector<RequestPtr> ended_;
};

}  // namespace fccl::cpu
