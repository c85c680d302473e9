#include "common/error.h"

#include <cstring>

namespace fccl {

bool Error::is_sticky() const noexcept {
  return kind_ != ErrorKind::kInvalid && kind_ != ErrorKind::kMismatch;
}

Error system_error(const std::string& what, int errno_value) {
  return Error(ErrorKind::kSystem, what + ": " + std::strerror(errno_value));
}

}  // namespace fccl
