#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "simulation.h"

namespace fccl::sim {
namespace {

struct Log {
  std::mutex mutex;
  std::string text;
};
Log& log() {
  static auto* log = new Log();
  return *log;
}

}  // namespace

void note(const char* format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof(line), format, arguments);
  va_end(arguments);
  const std::lock_guard lock(log().mutex);
  log().text += line;
  log().text += '\n';
}

}  // namespace fccl::sim

// For tests: how many bytes the log has; as many as fit are copied. Then it is emptied if all did.
FCCL_SIM_EXPORT std::size_t fccl_sim_take_log(char* to, std::size_t size) {
  auto& log = fccl::sim::log();
  const std::lock_guard lock(log.mutex);
  const std::size_t length = log.text.size();
  if (to != nullptr && size >= length) {
    std::memcpy(to, log.text.data(), length);
    log.text.clear();
  }
  return length;
}
