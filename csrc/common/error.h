// The one error type of the engine. Messages are written for the person who reads them: what was
// called, with what, on which rank, what was expected, what to do.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fccl {

enum class ErrorKind : std::uint8_t {
  kInvalid = 1,      // this rank's own arguments are wrong; the group stays usable
  kMismatch = 2,     // ranks made calls that do not fit; all of them raise, the group stays usable
  kTimeout = 3,      // a collective's own deadline passed; the group is failed for good
  kPeerDied = 4,     // a peer's process ended without a goodbye; the group is failed for good
  kPeerLeft = 5,     // a peer destroyed the group; the group is failed for good
  kPeerFailed = 6,   // a peer reported that the group failed there; the group is failed for good
  kAborted = 7,      // abort() was called here; the group is failed for good
  kInterrupted = 8,  // the interrupt check asked to stop (Ctrl-C); the group is failed for good
  kSystem = 9,       // the operating system refused something
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }
  // Whether a group that raised this can never be used again.
  bool is_sticky() const noexcept;

 private:
  ErrorKind kind_;
};

// Error of kind kSystem: "<what>: <strerror(errno_value)>".
Error system_error(const std::string& what, int errno_value);

}  // namespace fccl
