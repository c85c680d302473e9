#include <cstdlib>

#include "simulation.h"

namespace fccl::sim {

long setting(const char* name, long otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr || *value == 0 ? otherwise : std::strtol(value, nullptr, 10);
}

}  // namespace fccl::sim
