// Connects the ranks of a node to one another, each pair by one Unix socket, and makes sure that the
// other end is who it should be.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "cpu/segment.h"
#include "cpu/siphash.h"

namespace fccl::cpu {

// An abstract Unix socket (SOCK_SEQPACKET) that others can connect to.
class Listener {
 public:
  Listener();  // picks a random name; throws Error (kSystem)
  const std::string& name() const noexcept { return name_; }
  const Descriptor& socket() const noexcept { return socket_; }

 private:
  std::string name_;
  Descriptor socket_;
};

// Whether somebody listens there; a listener sees a stranger that says nothing.
bool is_listening(const std::string& name);

struct Connection {
  Descriptor socket;  // non-blocking; empty for oneself
  pid_t pid = 0;      // as the kernel says; 0 if it lives in a PID namespace we cannot see
};

// Rank i connects to every lower rank and accepts every higher one. Before anything else passes, both
// ends prove that they know `token` without telling it:
//
//   connector -> acceptor   from, to, nonce c
//   acceptor  -> connector  nonce a, siphash(token, "a" from to c a)
//   connector -> acceptor   siphash(token, "c" from to c a)
//
// and both check with SO_PEERCRED that the other runs as the same user. A stranger who connects and
// says nothing costs a slot in a table for a while, and stalls nobody.
//
// Returns a connection per rank. Throws Error: kTimeout names the ranks that are missing; kSystem.
// `check` is called regularly and may throw.
std::vector<Connection> connect_mesh(const Listener& listener, const std::vector<std::string>& names,
                                     int rank, const SipKey& token, const Deadline& deadline,
                                     const std::function<void()>& check);

}  // namespace fccl::cpu
