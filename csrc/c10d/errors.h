// From the engine's errors to the exceptions that torch turns into Python's.
#pragma once

#include <exception>
#include <string>

#include "common/error.h"

namespace fccl::c10d_backend {

// kInvalid -> ValueError; a lost or failed peer -> DistNetworkError; the rest -> DistBackendError.
// All of the latter are torch.distributed.DistError in Python, hence RuntimeError.
[[noreturn]] void throw_as_torch(const Error& error);

// The exception in flight (call inside a catch block), translated if it is an fccl::Error.
std::exception_ptr current_as_torch() noexcept;

}  // namespace fccl::c10d_backend
