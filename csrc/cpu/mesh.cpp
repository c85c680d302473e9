#include "cpu/mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "common/error.h"
#include "cpu/environment.h"

namespace fccl::cpu {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kMaxStrangers = 64;
constexpr auto kStrangerPatience = std::chrono::seconds(5);

struct Challenge {
  std::uint32_t from;
  std::uint32_t to;
  std::uint64_t nonce;
};
struct Answer {
  std::uint64_t nonce;
  std::uint64_t proof;
};

std::uint64_t proof(const SipKey& token, char role, const Challenge& challenge,
                    std::uint64_t acceptor_nonce) {
  const std::array<std::uint64_t, 4> words = {static_cast<std::uint64_t>(role),
                                              (std::uint64_t{challenge.from} << 32) | challenge.to,
                                              challenge.nonce, acceptor_nonce};
  return siphash(token, words.data(), sizeof(words));
}

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // sun_path[0] stays NUL: the abstract namespace, which leaves no file behind.
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// The peer's process id if it runs as our user, else -1.
pid_t trusted_pid(int fd) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return -1;
  return credentials.uid == ::geteuid() ? credentials.pid : -1;
}

// One whole message, or false if there is none yet. Throws on a closed or misbehaving peer.
template <typename T>
bool receive(int fd, T& message) {
  const ssize_t got = ::recv(fd, &message, sizeof(T), MSG_DONTWAIT | MSG_TRUNC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got != static_cast<ssize_t>(sizeof(T)))
    throw Error(ErrorKind::kSystem, "closed or spoke another language");
  return true;
}

template <typename T>
void send(int fd, const T& message) {
  // A few bytes into an empty socket buffer: this cannot block.
  if (::send(fd, &message, sizeof(T), MSG_DONTWAIT | MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(T))) {
    throw system_error("closed during the handshake", errno);
  }
}

class Handshake {
 public:
  Handshake(const Listener& listener, const std::vector<std::string>& names, int rank, const SipKey& token)
      : listener_(listener),
        names_(names),
        rank_(rank),
        token_(token),
        connections_(names.size()),
        outgoing_(static_cast<std::size_t>(rank)) {}

  bool complete() const { return missing() == 0; }

  std::string missing_ranks() const {
    std::string text;
    for (std::size_t peer = 0; peer < names_.size(); ++peer) {
      if (static_cast<int>(peer) == rank_ || connections_[peer].socket) continue;
      text += (text.empty() ? "" : ", ") + std::to_string(peer);
    }
    return text;
  }

  void step() {
    for (std::size_t peer = 0; peer < outgoing_.size(); ++peer) advance_outgoing(peer);
    accept_all();
    for (std::size_t i = incoming_.size(); i-- > 0;) {
      if (!advance_incoming(incoming_[i]))
        incoming_.erase(incoming_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  void wait(std::chrono::milliseconds limit) {
    std::vector<pollfd> fds = {{listener_.socket().get(), POLLIN, 0}};
    for (const Outgoing& out : outgoing_) {
      if (out.socket) fds.push_back({out.socket.get(), POLLIN, 0});
    }
    for (const Incoming& in : incoming_) fds.push_back({in.socket.get(), POLLIN, 0});
    ::poll(fds.data(), fds.size(), static_cast<int>(limit.count()));
  }

  std::vector<Connection> take() { return std::move(connections_); }

 private:
  struct Outgoing {
    Descriptor socket;
    Challenge challenge{};
  };
  struct Incoming {
    Descriptor socket;
    pid_t pid = 0;
    Clock::time_point since;
    bool challenged = false;
    Challenge challenge{};
    std::uint64_t nonce = 0;
  };

  std::size_t missing() const {
    std::size_t count = 0;
    for (const Connection& connection : connections_) count += connection.socket ? 0 : 1;
    return count - 1;  // oneself
  }

  void advance_outgoing(std::size_t peer) {
    if (connections_[peer].socket) return;
    Outgoing& out = outgoing_[peer];
    if (!out.socket) {
      Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (!socket) throw system_error("socket", errno);
      socklen_t length = 0;
      const sockaddr_un address = address_of(names_[peer], length);
      if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
        if (errno == EAGAIN || errno == EINTR) return;  // its backlog is full: next time
        throw system_error("connecting to rank " + std::to_string(peer) + "'s socket", errno);
      }
      if (trusted_pid(socket.get()) < 0) {
        throw Error(ErrorKind::kSystem, "rank " + std::to_string(peer) + "'s socket belongs to another user");
      }
      out.challenge = {static_cast<std::uint32_t>(rank_), static_cast<std::uint32_t>(peer), random_u64()};
      send(socket.get(), out.challenge);
      out.socket = std::move(socket);
      return;
    }
    Answer answer{};
    if (!receive(out.socket.get(), answer)) return;
    if (answer.proof != proof(token_, 'a', out.challenge, answer.nonce)) {
      throw Error(ErrorKind::kSystem, "whoever answers at rank " + std::to_string(peer) +
                                          "'s socket does not know this group's token");
    }
    send(out.socket.get(), proof(token_, 'c', out.challenge, answer.nonce));
    const pid_t pid = trusted_pid(out.socket.get());
    connections_[peer] = {std::move(out.socket), pid};
  }

  void accept_all() {
    while (incoming_.size() < kMaxStrangers + names_.size()) {
      Descriptor socket(::accept4(listener_.socket().get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) return;
      const pid_t pid = trusted_pid(socket.get());
      if (pid < 0) continue;
      Incoming in;
      in.socket = std::move(socket);
      in.pid = pid;
      in.since = Clock::now();
      incoming_.push_back(std::move(in));
    }
  }

  // False: done with this one, in whatever way. A stranger's mistakes are no error of ours.
  bool advance_incoming(Incoming& in) {
    try {
      if (!in.challenged) {
        if (!receive(in.socket.get(), in.challenge)) return Clock::now() - in.since < kStrangerPatience;
        const std::uint32_t from = in.challenge.from;
        if (in.challenge.to != static_cast<std::uint32_t>(rank_) ||
            from <= static_cast<std::uint32_t>(rank_) || from >= names_.size() || connections_[from].socket) {
          return false;
        }
        in.challenged = true;
        in.nonce = random_u64();
        send(in.socket.get(), Answer{in.nonce, proof(token_, 'a', in.challenge, in.nonce)});
      }
      std::uint64_t answer = 0;
      if (!receive(in.socket.get(), answer)) return Clock::now() - in.since < kStrangerPatience;
      Connection& connection = connections_[in.challenge.from];
      if (answer != proof(token_, 'c', in.challenge, in.nonce) || connection.socket) return false;
      connection = {std::move(in.socket), in.pid};
      return false;
    } catch (const Error&) {
      return false;
    }
  }

  const Listener& listener_;
  const std::vector<std::string>& names_;
  const int rank_;
  const SipKey token_;
  std::vector<Connection> connections_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
};

}  // namespace

Listener::Listener() {
  std::array<unsigned char, 16> random{};
  random_bytes(random.data(), random.size());
  static constexpr char kHex[] = "0123456789abcdef";
  name_ = "fccl-";
  for (const unsigned char byte : random) {
    name_ += kHex[byte >> 4];
    name_ += kHex[byte & 15];
  }
  socket_ = Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) throw system_error("socket(AF_UNIX, SOCK_SEQPACKET)", errno);
  socklen_t length = 0;
  const sockaddr_un address = address_of(name_, length);
  if (::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    throw system_error("binding an abstract Unix socket", errno);
  }
  if (::listen(socket_.get(), 1024) != 0) throw system_error("listening on an abstract Unix socket", errno);
}

bool is_listening(const std::string& name) {
  const Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  socklen_t length = 0;
  const sockaddr_un address = address_of(name, length);
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0 ||
         errno != ECONNREFUSED;
}

std::vector<Connection> connect_mesh(const Listener& listener, const std::vector<std::string>& names,
                                     int rank, const SipKey& token, const Deadline& deadline,
                                     const std::function<void()>& check) {
  Handshake handshake(listener, names, rank, token);
  while (true) {
    handshake.step();
    if (handshake.complete()) return handshake.take();
    check();
    if (deadline.expired()) {
      throw Error(ErrorKind::kTimeout, "these ranks did not connect in time: " + handshake.missing_ranks());
    }
    handshake.wait(deadline.left(std::chrono::milliseconds(20)));
  }
}

}  // namespace fccl::cpu
