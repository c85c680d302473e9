#include "cpu/matcher.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/tuning.h"
#include "cpu/zero_copy.h"

namespace fccl::cpu {

namespace {

std::string dtype_name(const Record& record) {
  return record.dtype < kDTypeCount ? name_of(static_cast<DType>(record.dtype)) : "an unknown dtype";
}

}  // namespace

Matcher::Matcher(Group::State& state) : state_(state), peers_(static_cast<std::size_t>(state.world_size())) {}

Lane& Matcher::lane(int peer) {
  std::optional<Lane>& lane = at(peer).lane;
  if (!lane) lane.emplace(state_, peer);
  return *lane;
}

std::string Matcher::describe(const Request& request) {
  std::string text = std::string(request.sends ? "send(" : "recv(") + name_of(request.dtype) +
                     ", count=" + std::to_string(request.count) + ", tag=" + std::to_string(request.tag) +
                     (request.sends ? ") to " : ") from ");
  return text + (request.peer < 0 ? "any rank" : "rank " + std::to_string(request.peer));
}

std::string Matcher::place() const { return ", " + state_.where(); }

std::string Matcher::describe_unmatched() const {
  std::string text;
  for (int rank = 0; rank < state_.world_size(); ++rank) {
    const Peer& peer = at(rank);
    if (peer.unmatched.empty()) continue;
    text += (text.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank) + " has sent ";
    for (std::size_t i = 0; i < std::min<std::size_t>(peer.unmatched.size(), 8); ++i)
      text += (i == 0 ? "tag " : ", ") + std::to_string(peer.unmatched[i].record.tag);
    if (peer.unmatched.size() > 8) text += " and others";
  }
  return text;
}

std::string Matcher::describe_requests_with(int rank) const {
  std::vector<RequestPtr> waiting;
  for (const RequestPtr& request : receives_) {
    if (request->peer < 0 || request->peer == rank) waiting.push_back(request);
  }
  const Peer& peer = at(rank);
  waiting.insert(waiting.end(), peer.collecting.begin(), peer.collecting.end());
  for (const Fetch& fetch : peer.fetching) waiting.push_back(fetch.request);
  for (const Outgoing& outgoing : peer.queue) {
    if (outgoing.request) waiting.push_back(outgoing.request);
  }
  for (const auto& [id, request] : peer.offered) waiting.push_back(request);
  waiting.insert(waiting.end(), peer.staging.begin(), peer.staging.end());
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(waiting.size(), 4); ++i)
    text += (i == 0 ? "" : ", ") + describe(*waiting[i]);
  return waiting.size() > 4 ? text + " and others" : text;
}

bool Matcher::is_unmatched(const Request& request) const {
  return std::any_of(receives_.begin(), receives_.end(),
                     [&](const RequestPtr& each) { return each.get() == &request; });
}

bool Matcher::is_busy_with(int peer) const { return at(peer).requests != 0 || !at(peer).queue.empty(); }

bool Matcher::is_busy() const {
  if (from_any_ != 0) return true;
  for (int rank = 0; rank < state_.world_size(); ++rank) {
    if (is_busy_with(rank)) return true;
  }
  return false;
}

// ---- requests ----

void Matcher::post(const RequestPtr& request) {
  if (request->sends) {
    post_send(request);
  } else {
    post_receive(request);
  }
}

void Matcher::post_send(const RequestPtr& request) {
  Lane& own = lane(request->peer);
  Peer& peer = at(request->peer);
  ++peer.requests;
  ++sends_;
  Record record;
  record.dtype = static_cast<std::uint32_t>(request->dtype);
  record.id = peer.next_id++;
  record.tag = request->tag;
  record.count = request->count;
  record.bytes = request->bytes();
  if (record.bytes <= kEagerBytes) {
    record.kind = RecordKind::kEager;
    peer.queue.push_back({record, request});
  } else {
    record.kind = RecordKind::kOffer;
    record.at = locate(state_, request->data, record.bytes);
    peer.offered.emplace(record.id, request);
    peer.queue.push_back({record, nullptr});
  }
  if (state_.config.testing.lie) [[unlikely]]
    state_.config.testing.lie(&peer.queue.back().record, true);
  flush(peer);
  own.ring();
}

void Matcher::post_receive(const RequestPtr& request) {
  // The earliest message that fits, if one has come.
  Peer* from = nullptr;
  std::deque<Unmatched>::iterator found;
  int source = -1;
  for (int rank = 0; rank < state_.world_size(); ++rank) {
    if (request->peer >= 0 && rank != request->peer) continue;
    auto& messages = at(rank).unmatched;
    const auto first = std::find_if(messages.begin(), messages.end(), [&](const Unmatched& message) {
      return message.record.tag == request->tag;
    });
    if (first == messages.end() || (from != nullptr && found->order < first->order)) continue;
    from = &at(rank);
    found = first;
    source = rank;
  }
  if (from == nullptr) {
    if (request->peer < 0) {
      ++from_any_;
      for (int rank = 0; rank < state_.world_size(); ++rank) {
        if (rank != state_.rank()) lane(rank);
      }
    } else {
      lane(request->peer);
      ++at(request->peer).requests;
    }
    receives_.push_back(request);
    return;
  }
  request->peer = source;
  ++from->requests;
  const Unmatched message = std::move(*found);
  from->unmatched.erase(found);
  keep(*from, -static_cast<std::int64_t>(message.message.size()));
  accept(source, message.record, message.message.data(), request);
  flush(*from);
  lane(source).ring();
}

void Matcher::keep(Peer& peer, std::int64_t bytes) {
  if (bytes == 0) return;
  peer.kept += static_cast<std::uint64_t>(bytes);
  peer.lane->publish_kept(peer.kept);
}

bool Matcher::withdraw(const RequestPtr& request) {
  const auto found = std::find(receives_.begin(), receives_.end(), request);
  if (found == receives_.end()) return false;
  receives_.erase(found);
  if (request->peer < 0) --from_any_;
  end(request, Error(ErrorKind::kAborted, "fccl " + describe(*request) + place() + ": was given up"));
  return true;
}

bool Matcher::has_something_to_say() const {
  if (sends_ != 0) return true;
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return !peer.queue.empty(); });
}

void Matcher::end(const RequestPtr& request, std::optional<Error> error) {
  if (std::exchange(request->ended, true)) return;
  request->error = std::move(error);
  if (request->peer >= 0) --at(request->peer).requests;
  if (request->sends) --sends_;
  ended_.push_back(request);
}

void Matcher::fail_all(const Error& error) {
  for (const RequestPtr& request : std::exchange(receives_, {})) end(request, error);
  from_any_ = 0;
  for (Peer& peer : peers_) {
    for (const Outgoing& out : std::exchange(peer.queue, {})) {
      if (out.request) end(out.request, error);
    }
    for (const auto& [id, request] : std::exchange(peer.offered, {})) end(request, error);
    for (const RequestPtr& request : std::exchange(peer.staging, {})) end(request, error);
    for (const RequestPtr& request : std::exchange(peer.collecting, {})) end(request, error);
    for (const Fetch& fetch : std::exchange(peer.fetching, {})) end(fetch.request, error);
  }
}

// ---- progress ----

bool Matcher::progress() {
  bool moved = false;
  for (int rank = 0; rank < state_.world_size(); ++rank) {
    if (!at(rank).lane || (!is_busy_with(rank) && from_any_ == 0)) continue;
    moved = step(rank) || moved;
  }
  return moved;
}

bool Matcher::step(int rank) {
  Peer& peer = at(rank);
  bool moved = drain(rank);
  moved = stage(peer) || moved;
  moved = collect(peer) || moved;
  moved = fetch(rank, peer) || moved;
  moved = flush(peer) || moved;
  peer.lane->ring();
  return moved;
}

bool Matcher::drain(int rank) {
  Lane& lane = *at(rank).lane;
  bool moved = false;
  const std::byte* message = nullptr;
  while (const auto record = lane.peek(message)) {
    arrived(rank, *record, message);
    lane.next();
    moved = true;
  }
  return moved;
}

RequestPtr Matcher::take_offer(int rank, std::uint64_t id) {
  auto& offered = at(rank).offered;
  const auto found = offered.find(id);
  if (found == offered.end()) {
    throw Error(ErrorKind::kSystem, "fccl point-to-point" + place() + ": rank " + std::to_string(rank) +
                                        " answers a message that it was not offered; its memory is damaged");
  }
  RequestPtr request = std::move(found->second);
  offered.erase(found);
  return request;
}

void Matcher::arrived(int rank, const Record& record, const std::byte* message) {
  Peer& peer = at(rank);
  switch (record.kind) {
    case RecordKind::kGo: {
      RequestPtr request = take_offer(rank, record.id);
      peer.staging.push_back(std::move(request));
      return;
    }
    case RecordKind::kTaken:
      state_.zero_copies.fetch_add(1, std::memory_order_relaxed);
      end(take_offer(rank, record.id));
      return;
    case RecordKind::kRefused: {
      const RequestPtr request = take_offer(rank, record.id);
      end(request,
          Error(ErrorKind::kMismatch,
                "fccl " + describe(*request) + place() + ": rank " + std::to_string(rank) + " receives " +
                    std::to_string(record.count) + " elements of " + dtype_name(record) +
                    ". The message was not delivered and the group stays usable; send and receive "
                    "tensors of one dtype and size"));
      return;
    }
    case RecordKind::kEager:
    case RecordKind::kOffer:
    case RecordKind::kSkip: break;
  }
  const auto match = std::find_if(receives_.begin(), receives_.end(), [&](const RequestPtr& request) {
    return (request->peer == rank || request->peer < 0) && request->tag == record.tag;
  });
  if (match == receives_.end()) {
    Unmatched unmatched{++arrivals_, record, {}};
    if (record.kind == RecordKind::kEager) unmatched.message.assign(message, message + record.bytes);
    const auto size = static_cast<std::int64_t>(unmatched.message.size());
    peer.unmatched.push_back(std::move(unmatched));
    keep(peer, size);
    return;
  }
  const RequestPtr request = std::move(*match);
  receives_.erase(match);
  if (request->peer < 0) {
    --from_any_;
    request->peer = rank;
    ++peer.requests;
  }
  accept(rank, record, message, request);
}

void Matcher::answer(Peer& peer, RecordKind kind, const Record& record) {
  Record reply;
  reply.kind = kind;
  reply.id = record.id;
  reply.dtype = record.dtype;
  reply.count = record.count;
  peer.queue.push_back({reply, nullptr});
}

// Record and receive have found each other. `message` is the record's if it is eager.
void Matcher::accept(int rank, const Record& record, const std::byte* message, const RequestPtr& request) {
  Peer& peer = at(rank);
  const bool eager = record.kind == RecordKind::kEager;
  if (record.dtype != static_cast<std::uint32_t>(request->dtype) || record.count != request->count ||
      record.bytes != request->bytes()) {
    if (!eager) {
      Record expected = record;
      expected.dtype = static_cast<std::uint32_t>(request->dtype);
      expected.count = request->count;
      answer(peer, RecordKind::kRefused, expected);
    }
    end(request, Error(ErrorKind::kMismatch,
                       "fccl " + describe(*request) + place() + ": rank " + std::to_string(rank) + " sent " +
                           std::to_string(record.count) + " elements of " + dtype_name(record) +
                           ". The message was not delivered and the group stays usable; send and receive "
                           "tensors of one dtype and size"));
    return;
  }
  if (eager) {
    if (record.bytes != 0) std::memcpy(request->data, message, record.bytes);
    end(request);
  } else if (record.at != Description::kNowhere && state_.arenas_usable()) {
    const std::span<std::byte> arena = state_.node->arena_of(state_.members[static_cast<std::size_t>(rank)]);
    if (record.at > arena.size() || record.bytes > arena.size() - record.at) {
      peer.fetching.push_back({request, nullptr, record.id});  // ends with the others
      throw Error(ErrorKind::kSystem, "fccl " + describe(*request) + place() + ": rank " +
                                          std::to_string(rank) +
                                          " names a place outside its arena; its memory is damaged");
    }
    peer.fetching.push_back({request, arena.data() + record.at, record.id});
  } else {
    peer.collecting.push_back(request);
    answer(peer, RecordKind::kGo, record);
  }
}

// Puts one chunk of the message that was asked for first into a slot.
bool Matcher::stage(Peer& peer) {
  if (peer.staging.empty()) return false;
  std::byte* slot = peer.lane->free_slot();
  if (slot == nullptr) return false;
  Request& request = *peer.staging.front();
  const std::size_t size = std::min(kLaneChunkBytes, request.bytes() - request.moved);
  std::memcpy(slot, request.data + request.moved, size);
  peer.lane->publish_staged();
  request.moved += size;
  if (request.moved == request.bytes()) {
    end(peer.staging.front());
    peer.staging.pop_front();
  }
  return true;
}

bool Matcher::collect(Peer& peer) {
  if (peer.collecting.empty()) return false;
  const std::byte* chunk = peer.lane->next_chunk();
  if (chunk == nullptr) return false;
  Request& request = *peer.collecting.front();
  const std::size_t size = std::min(kLaneChunkBytes, request.bytes() - request.moved);
  std::memcpy(request.data + request.moved, chunk, size);
  peer.lane->publish_copied();
  request.moved += size;
  if (request.moved == request.bytes()) {
    end(peer.collecting.front());
    peer.collecting.pop_front();
  }
  return true;
}

bool Matcher::fetch(int rank, Peer& peer) {
  if (peer.fetching.empty()) return false;
  const Fetch& fetch = peer.fetching.front();
  Request& request = *fetch.request;
  if (state_.config.testing.pause) [[unlikely]]
    state_.config.testing.pause();
  const std::size_t size = std::min(kPullBytes, request.bytes() - request.moved);
  std::memcpy(request.data + request.moved, fetch.from + request.moved, size);
  request.moved += size;
  if (request.moved < request.bytes()) return true;
  std::atomic_thread_fence(std::memory_order_acquire);  // after the fetch: see matcher.h
  const auto status = static_cast<RankState>(
      state_.controls[static_cast<std::size_t>(rank)]->status.state.load(std::memory_order_acquire));
  // A peer that failed or left may have written to it: the request stays, and fails with the group.
  if (status != RankState::kActive) return false;
  Record record;
  record.id = fetch.id;
  answer(peer, RecordKind::kTaken, record);
  state_.zero_copies.fetch_add(1, std::memory_order_relaxed);
  end(fetch.request);
  peer.fetching.pop_front();
  return true;
}

bool Matcher::flush(Peer& peer) {
  bool moved = false;
  while (!peer.queue.empty()) {
    Outgoing& out = peer.queue.front();
    // Now and not when it was posted: much may have been waiting for room in the ring.
    if (out.request && peer.lane->kept_by_peer() >= kMostKept) {
      out.record.kind = RecordKind::kOffer;
      out.record.at = locate(state_, out.request->data, out.record.bytes);
      peer.offered.emplace(out.record.id, std::move(out.request));
      out.request = nullptr;
    }
    if (!peer.lane->write(out.record, out.request ? out.request->data : nullptr)) break;
    if (out.request) end(out.request);
    peer.queue.pop_front();
    moved = true;
  }
  return moved;
}

}  // namespace fccl::cpu
