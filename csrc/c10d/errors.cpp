#include "c10d/errors.h"

#include <c10/util/Exception.h>

#include "c10d/process.h"

namespace fccl::c10d_backend {

void throw_as_torch(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kInvalid: C10_THROW_ERROR(ValueError, error.what());
    case ErrorKind::kInterrupted:
      check_interrupt();  // throws Python's own exception if it is still pending
      C10_THROW_ERROR(DistBackendError, error.what());
    case ErrorKind::kPeerDied:
    case ErrorKind::kPeerLeft:
    case ErrorKind::kPeerFailed: C10_THROW_ERROR(DistNetworkError, error.what());
    case ErrorKind::kMismatch:
    case ErrorKind::kTimeout:
    case ErrorKind::kAborted:
    case ErrorKind::kSystem: break;
  }
  C10_THROW_ERROR(DistBackendError, error.what());
}

std::exception_ptr current_as_torch() noexcept {
  try {
    try {
      throw;
    } catch (const Error& error) {
      throw_as_torch(error);
    }
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace fccl::c10d_backend
