#include "cpu/environment.h"

#include <pthread.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <mutex>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

#include "common/error.h"

namespace fccl::cpu {

namespace {

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// This process's cgroup v2 directory and all above it, the innermost first.
std::vector<std::string> cgroup_directories() {
  std::vector<std::string> directories;
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("0::", 0) != 0) continue;
    std::string path = line.substr(3);
    while (true) {
      directories.push_back("/sys/fs/cgroup" + (path == "/" ? std::string() : path));
      if (path.empty() || path == "/") break;
      path.resize(path.find_last_of('/'));
    }
  }
  return directories;
}

std::size_t parse_bytes(const std::string& text) {
  if (text.empty() || text == "max") return std::numeric_limits<std::size_t>::max();
  return std::strtoull(text.c_str(), nullptr, 10);
}

std::atomic<std::uint32_t> generation{0};

}  // namespace

int usable_cores() {
  int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = CPU_COUNT(&set);
  for (const std::string& directory : cgroup_directories()) {
    std::istringstream line(read_line(directory + "/cpu.max"));
    std::string quota;
    long period = 0;
    if (line >> quota >> period && quota != "max" && period > 0) {
      const long limit = (std::strtol(quota.c_str(), nullptr, 10) + period - 1) / period;
      cores = static_cast<int>(std::min<long>(cores, std::max(1L, limit)));
    }
  }
  return std::max(1, cores);
}

std::size_t available_memory() {
  std::size_t available = std::numeric_limits<std::size_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  std::string name;
  std::size_t kib = 0;
  std::string unit;
  while (meminfo >> name >> kib && std::getline(meminfo, unit)) {
    if (name == "MemAvailable:") available = kib * 1024;
  }
  for (const std::string& directory : cgroup_directories()) {
    const std::size_t limit = parse_bytes(read_line(directory + "/memory.max"));
    if (limit == std::numeric_limits<std::size_t>::max()) continue;
    const std::string current = read_line(directory + "/memory.current");
    const std::size_t used = current.empty() ? 0 : parse_bytes(current);
    available = std::min(available, limit > used ? limit - used : 0);
  }
  return available;
}

std::string boot_id() { return read_line("/proc/sys/kernel/random/boot_id"); }

std::uint64_t network_namespace() {
  struct stat info{};
  if (stat("/proc/self/ns/net", &info) != 0) return 0;
  return static_cast<std::uint64_t>(info.st_ino);
}

bool shared_memory_enabled() {
  const char* value = std::getenv("FCCL_SHM");
  if (value == nullptr) return true;
  const std::string text(value);
  return !(text == "0" || text == "off" || text == "no" || text == "false");
}

std::uint64_t arena_size() {
  constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();
  const char* value = std::getenv("FCCL_ARENA_SIZE");
  if (value == nullptr || *value == '\0') return kNoLimit;
  static constexpr std::string_view kUnits = "KMGT";
  const std::string_view text(value);
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.begin(), text.end(), number);
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.begin()));
  const std::size_t power = unit.empty() ? 0 : kUnits.find(unit[0]) + 1;
  if (error != std::errc() || unit.size() > 1 || (unit.size() == 1 && power == 0)) {
    throw Error(ErrorKind::kInvalid, "the environment variable FCCL_ARENA_SIZE is '" + std::string(text) +
                                         "', expected a number of bytes, with K, M, G or T behind it if need "
                                         "be, such as 8G, or 0");
  }
  const std::size_t shift = 10 * power;
  return number > kNoLimit >> shift ? kNoLimit : number << shift;
}

LargePages large_pages(const std::string& folder) {
  // The choice in force stands in brackets. Each size of page has one, which may defer to the one for all.
  const auto chosen = [](const std::string& path) {
    const std::string line = read_line(path);
    const std::size_t begin = line.find('[');
    const std::size_t end = line.find(']');
    return end == std::string::npos || begin > end ? std::string() : line.substr(begin + 1, end - begin - 1);
  };
  const std::string all = chosen(folder + "/shmem_enabled");
  const std::string of_size = chosen(folder + "/hugepages-2048kB/shmem_enabled");
  // "force" and "deny" overrule everything; kernels before 6.10 have no choice for each size.
  const bool defers = of_size.empty() || of_size == "inherit" || all == "force" || all == "deny";
  const std::string& choice = defers ? all : of_size;
  if (choice == "advise") return LargePages::kOnAdvice;
  return choice == "always" || choice == "within_size" || choice == "force" ? LargePages::kByItself
                                                                            : LargePages::kNever;
}

const char* name_of(LargePages pages) noexcept {
  switch (pages) {
    case LargePages::kNever: return "no";
    case LargePages::kOnAdvice: return "asked for";
    case LargePages::kByItself: return "by the system";
  }
  return "no";
}

void random_bytes(void* out, std::size_t size) {
  auto* bytes = static_cast<unsigned char*>(out);
  while (size > 0) {
    const ssize_t got = getrandom(bytes, size, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw system_error("getrandom", errno);
    }
    bytes += got;
    size -= static_cast<std::size_t>(got);
  }
}

std::uint64_t random_u64() {
  std::uint64_t value = 0;
  while (value == 0) random_bytes(&value, sizeof(value));
  return value;
}

std::uint32_t fork_generation() noexcept {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  });
  return generation.load(std::memory_order_relaxed);
}

}  // namespace fccl::cpu
