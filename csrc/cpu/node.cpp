#include "cpu/node.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "common/error.h"
#include "cpu/environment.h"
#include "cpu/fork_guard.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace fccl::cpu {

namespace {

std::mutex registry_mutex;
std::vector<std::weak_ptr<Node>> registry;
std::uint32_t registry_generation = 0;

// A group's tag travels with the descriptor.
struct Parcel {
  std::uint64_t magic = 0x6c65637261506c63ULL;
  std::uint64_t group = 0;
};

// A parcel and one descriptor, as sendmsg and recvmsg want them.
struct Envelope {
  Envelope() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
  }
  Envelope(const Envelope&) = delete;
  Envelope& operator=(const Envelope&) = delete;

  Parcel parcel;
  iovec data{&parcel, sizeof(parcel)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
};

// A group that is set up with many others at once must not be able to fill our memory.
constexpr std::size_t kMaxStash = 4096;

}  // namespace

Node::Node(std::uint64_t id, int self, std::vector<ProcessId> members, std::vector<Connection> connections)
    : id_(id), self_(self), generation_(fork_generation()) {
  for (std::size_t i = 0; i < members.size(); ++i) {
    auto member = std::make_unique<Member>();
    member->process = members[i];
    member->socket = std::move(connections[i].socket);
    if (member->socket) {
      close_in_children(member->socket.get());
      if (connections[i].pid > 0) {
        member->pidfd = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, connections[i].pid, 0)));
        // The process id may have been used again by now; then the socket's end is what tells.
      }
    }
    members_.push_back(std::move(member));
  }
}

Node::~Node() {
  if (generation_ != fork_generation()) return;  // the child's copies are /dev/null already
  for (const auto& member : members_) {
    if (member->socket) forget_descriptor(member->socket.get());
  }
}

void Node::publish(const std::shared_ptr<Node>& node) {
  const std::lock_guard lock(registry_mutex);
  std::erase_if(registry, [](const std::weak_ptr<Node>& entry) { return entry.expired(); });
  registry_generation = fork_generation();
  registry.push_back(node);
}

std::shared_ptr<Node> Node::newest() {
  const std::lock_guard lock(registry_mutex);
  if (registry_generation != fork_generation()) return nullptr;
  for (auto it = registry.rbegin(); it != registry.rend(); ++it) {
    if (std::shared_ptr<Node> node = it->lock())
      return node->generation_ == fork_generation() ? node : nullptr;
  }
  return nullptr;
}

int Node::index_of(const ProcessId& process) const noexcept {
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (members_[i]->process == process) return static_cast<int>(i);
  }
  return -1;
}

void Node::send_descriptor(int member, std::uint64_t group, const Descriptor& descriptor) {
  Envelope envelope;
  envelope.parcel.group = group;
  msghdr& message = envelope.message;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = descriptor.get();
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  const int socket = members_[static_cast<std::size_t>(member)]->socket.get();
  // 16 bytes: only thousands of groups set up at once and never read could fill the buffer.
  for (int tries = 0; ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof(Parcel); ++tries) {
    if ((errno != EAGAIN && errno != EINTR) || tries == 1000)
      throw system_error("passing a descriptor", errno);
    ::usleep(1000);
  }
}

// Takes one message off a member's socket; false if there is none. Called with mutex_ held.
bool Node::read_one(int member) {
  Envelope envelope;
  msghdr& message = envelope.message;
  const Parcel& parcel = envelope.parcel;
  Member& from = *members_[static_cast<std::size_t>(member)];
  const ssize_t got = ::recvmsg(from.socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
    throw system_error("receiving a descriptor", errno);
  }
  if (got == 0) throw Error(ErrorKind::kPeerDied, "closed its connection");

  Descriptor received;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    received = Descriptor(fd);
  }
  // MSG_CTRUNC: the kernel dropped descriptors, e.g. because our table is full.
  if (got != static_cast<ssize_t>(sizeof(parcel)) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 ||
      parcel.magic != Parcel{}.magic || !received) {
    throw Error(ErrorKind::kSystem,
                "sent something that is not a shared-memory descriptor, or this process "
                "is out of file descriptors (ulimit -n)");
  }
  if (stash_.size() >= kMaxStash)
    throw Error(ErrorKind::kSystem, "sent thousands of descriptors nobody asked for");
  stash_[{member, parcel.group}] = std::move(received);
  return true;
}

Descriptor Node::receive_descriptor(int member, std::uint64_t group, const Deadline& deadline,
                                    const std::function<void()>& check) {
  const int socket = members_[static_cast<std::size_t>(member)]->socket.get();
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      while (true) {
        const auto it = stash_.find({member, group});
        if (it != stash_.end()) {
          Descriptor descriptor = std::move(it->second);
          stash_.erase(it);
          return descriptor;
        }
        if (!read_one(member)) break;
      }
    }
    check();
    if (deadline.expired()) throw Error(ErrorKind::kTimeout, "did not send its shared memory in time");
    // Short, and without the lock: another group's thread may take our message off the socket.
    pollfd fd{socket, POLLIN, 0};
    ::poll(&fd, 1, 5);
  }
}

void Node::map_arenas(std::span<const std::uint64_t> arena_bytes, const Deadline& deadline,
                      const std::function<void()>& check) {
  // A tag that is no group's: the node has the name of the group that it was made for.
  const std::uint64_t tag = ~id_;
  const auto own = static_cast<std::size_t>(self_);
  if (std::find(arena_bytes.begin(), arena_bytes.end(), 0) != arena_bytes.end()) {  // all members see so
    why_no_arenas_ = arena_bytes[own] == 0
                         ? Arena::why_none()
                         : "a peer has no arena; fccl.memory_stats()['why_none'] tells there";
    return;
  }
  Arena* const arena = Arena::of_process();
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (i != own) send_descriptor(static_cast<int>(i), tag, arena->memory().descriptor());
  }
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (i == own) continue;
    const Descriptor descriptor = receive_descriptor(static_cast<int>(i), tag, deadline, check);
    try {
      members_[i]->arena = Segment::open(descriptor, arena_bytes[i], Segment::Access::kReadWrite);
    } catch (const Error& error) {
      // A limit on address space (ulimit -v), say. Our calls say "nowhere" from now on.
      why_no_arenas_ = std::string("a peer's arena could not be mapped: ") + error.what();
    }
  }
  if (why_no_arenas_.empty()) own_arena_ = arena;
}

std::span<std::byte> Node::arena_of(int member) const noexcept {
  const Segment& memory =
      member == self_ ? own_arena_->memory() : members_[static_cast<std::size_t>(member)]->arena;
  return {memory.data(), memory.size()};
}

bool Node::is_gone(int member) noexcept {
  Member& m = *members_[static_cast<std::size_t>(member)];
  if (member == self_) return false;
  if (m.gone.load(std::memory_order_relaxed)) return true;
  // poll ignores a negative descriptor, which an empty pidfd is.
  pollfd fds[2] = {{m.socket.get(), POLLRDHUP, 0}, {m.pidfd.get(), POLLIN, 0}};
  if (::poll(fds, 2, 0) <= 0) return false;
  const bool gone = (fds[0].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0 || (fds[1].revents & POLLIN) != 0;
  if (gone) m.gone.store(true, std::memory_order_relaxed);
  return gone;
}

}  // namespace fccl::cpu
