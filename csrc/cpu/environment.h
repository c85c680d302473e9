// What this machine and this process allow: cores, memory, identity, switches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fccl::cpu {

// Cores this process may use: the affinity mask, reduced by the cgroup's CPU quota (rounded up).
int usable_cores();

// Bytes that can still be allocated before the system or the cgroup runs out (what the kernel calls
// MemAvailable, and the room under the tightest cgroup limit).
std::size_t available_memory();

// The running kernel's boot id: equal on two ranks exactly if one kernel runs both.
std::string boot_id();
// Identity of the network namespace, in which abstract socket names live.
std::uint64_t network_namespace();

// FCCL_SHM: false for "0", "off", "no" or "false".
bool shared_memory_enabled();

// FCCL_ARENA_SIZE: the most memory, in bytes, that tensors shared with the peers may take in this process;
// K, M, G and T multiply by powers of 1024, 0 means none. Unset: no limit of its own. Throws Error (kInvalid)
// if it cannot be read.
std::uint64_t arena_size();

// Whether shared memory of this kernel's can lie on large pages (Documentation/admin-guide/mm/transhuge.rst
// of Linux): never, where a program asks for it, or by itself.
enum class LargePages { kNever, kOnAdvice, kByItself };
constexpr std::size_t kLargePage = 2U << 20;
LargePages large_pages(const std::string& folder = "/sys/kernel/mm/transparent_hugepage");
const char* name_of(LargePages pages) noexcept;  // "no", "asked for", "by the system"

// Bytes from the kernel's random generator.
void random_bytes(void* out, std::size_t size);
std::uint64_t random_u64();

// Counts the forks between the process that loaded fccl and this one: a child's copies of sockets
// and mappings are not its own to use.
std::uint32_t fork_generation() noexcept;

}  // namespace fccl::cpu
