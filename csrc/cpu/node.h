// The ranks that share memory with this process: connections to them, and whether they are alive.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/deadline.h"
#include "cpu/arena.h"
#include "cpu/hello.h"
#include "cpu/mesh.h"
#include "cpu/segment.h"

namespace fccl::cpu {

// Made when the first group connects, usually the default group, and shared by every later group all
// of whose ranks it holds; dies with the last of them. Thread-safe.
class Node {
 public:
  // `members[i]` is the process behind `connections[i]`; `self` is our own index.
  Node(std::uint64_t id, int self, std::vector<ProcessId> members, std::vector<Connection> connections);
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  // Makes the node findable for later groups of this process.
  static void publish(const std::shared_ptr<Node>& node);
  // The newest node of this process that is still in use, or null; none after a fork.
  static std::shared_ptr<Node> newest();

  std::uint64_t id() const noexcept { return id_; }
  // Number of processes that share this machine's cores with us, as far as we know; ourselves included.
  int size() const noexcept { return static_cast<int>(members_.size()); }
  // The member's index, or -1.
  int index_of(const ProcessId& process) const noexcept;

  // Passes a copy of `descriptor` to a member, marked with the group it is for. Throws kSystem.
  void send_descriptor(int member, std::uint64_t group, const Descriptor& descriptor);
  // The descriptor that `member` sent for `group`; descriptors for other groups that arrive meanwhile
  // are kept for them. Throws kTimeout, kPeerDied, kSystem; `check` may throw.
  Descriptor receive_descriptor(int member, std::uint64_t group, const Deadline& deadline,
                                const std::function<void()>& check);

  // Sends our arena to every member that has one and maps theirs, whose sizes `arena_bytes` gives; all
  // members call it together, once, before the node is published. Throws as receive_descriptor() does. What
  // only concerns arenas is no error: arenas_mapped() is false then.
  void map_arenas(std::span<const std::uint64_t> arena_bytes, const Deadline& deadline,
                  const std::function<void()>& check);
  // Whether this process has mapped every member's arena; its own calls can then do without copies.
  bool arenas_mapped() const noexcept { return own_arena_ != nullptr; }
  const std::string& why_no_arenas() const noexcept { return why_no_arenas_; }
  const Arena* own_arena() const noexcept { return own_arena_; }
  // A member's memory, ours included, if arenas_mapped().
  std::span<std::byte> arena_of(int member) const noexcept;

  // Whether the member's process has ended or closed its connection. Costs two system calls.
  bool is_gone(int member) noexcept;

 private:
  struct Member {
    ProcessId process{};
    Descriptor socket;
    Descriptor pidfd;  // empty where the kernel or a PID namespace denies it; the socket's end then tells
    std::atomic<bool> gone{false};
    Segment arena;
  };

  bool read_one(int member);

  const std::uint64_t id_;
  const int self_;
  const std::uint32_t generation_;
  std::vector<std::unique_ptr<Member>> members_;
  const Arena* own_arena_ = nullptr;
  std::string why_no_arenas_;
  std::mutex mutex_;  // the sockets' reading side and the stash
  std::map<std::pair<int, std::uint64_t>, Descriptor> stash_;
};

}  // namespace fccl::cpu
