#include "cpu/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

#include "common/error.h"
#include "cpu/environment.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace fccl::cpu {
namespace {

LargePages offered() noexcept {
  static const LargePages pages = [] {
    try {
      return large_pages();
    } catch (...) {
      return LargePages::kNever;
    }
  }();
  return pages;
}

// A large page is mapped as one only where its place in the file and its address agree.
std::byte* map_shared(int fd, std::size_t size, int protection) {
  constexpr int kFlags = MAP_SHARED | MAP_NORESERVE;
  if (size < kLargePage) {
    void* data = ::mmap(nullptr, size, protection, kFlags, fd, 0);
    return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
  }
  const std::size_t room = size + kLargePage;
  void* found = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(found);
  const std::size_t skipped =
      (kLargePage - reinterpret_cast<std::uintptr_t>(begin) % kLargePage) % kLargePage;
  void* data = ::mmap(begin + skipped, size, protection, kFlags | MAP_FIXED, fd, 0);
  // Whole pages are mapped, and what lies around them goes. Should the second mapping have failed, the place
  // may be another thread's already, and nothing but address space is lost if it is not.
  const int error = errno;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t end = skipped + (size + page - 1) / page * page;
  if (skipped != 0) ::munmap(begin, skipped);
  if (end < room) ::munmap(begin + end, room - end);
  errno = error;
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

}  // namespace

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      descriptor_(std::move(other.descriptor_)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

Segment Segment::create(std::size_t size) {
  Segment segment = reserve(size);
  segment.allocate(0, size);
  return segment;
}

void Segment::allocate(std::size_t offset, std::size_t size) {
  // A quarter of what is left stays for the program itself.
  const std::size_t available = available_memory();
  if (size > available / 4 * 3) {
    throw Error(ErrorKind::kSystem, "shared memory of " + std::to_string(size >> 10) +
                                        " KiB was asked for and only " + std::to_string(available >> 10) +
                                        " KiB of memory are available here");
  }
  const int error = put_memory(offset, size);
  if (error != 0) throw system_error("allocating " + std::to_string(size) + " bytes of shared memory", error);
}

int Segment::put_memory(std::size_t offset, std::size_t size) noexcept {
  return put_memory(offset, size, offered());
}

int Segment::put_memory(std::size_t offset, std::size_t size, LargePages offer) noexcept {
  // By the thread that will use it: under the usual policy memory then lies on the NUMA node it runs on.
  if (offer == LargePages::kOnAdvice && offset % kLargePage == 0) {
    // posix_fallocate() does not know of the mapping and its advice; being touched does. Where that is not to
    // be had (Linux before 5.14) or fails, the way below says what is wrong.
    const std::size_t whole = size / kLargePage * kLargePage;
    if (whole != 0 && ::madvise(data_ + offset, whole, MADV_POPULATE_WRITE) == 0) {
      offset += whole;
      size -= whole;
    }
  }
  int error = 0;
  while (size != 0) {
    error = ::posix_fallocate(descriptor_.get(), static_cast<off_t>(offset), static_cast<off_t>(size));
    if (error != EINTR) break;
  }
  return error;
}

Segment Segment::reserve(std::size_t size) {
  Segment segment;
  // The seal against executing is known since Linux 6.3; older kernels answer EINVAL.
  int fd = ::memfd_create("fccl", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create("fccl", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw system_error("memfd_create", errno);
  segment.descriptor_ = Descriptor(fd);
  if (::ftruncate(fd, static_cast<off_t>(size)) != 0) throw system_error("sizing shared memory", errno);
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw system_error("sealing shared memory", errno);
  }
  segment.data_ = map_shared(fd, size, PROT_READ | PROT_WRITE);
  if (segment.data_ == nullptr) throw system_error("mapping shared memory", errno);
  segment.size_ = size;
  if (offered() == LargePages::kOnAdvice) ::madvise(segment.data_, size, MADV_HUGEPAGE);
  return segment;
}

Segment Segment::open(const Descriptor& descriptor, std::size_t size, Access access) {
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0) throw system_error("a peer's descriptor is not shared memory that can be sealed", errno);
  if ((seals & F_SEAL_SHRINK) == 0) {
    throw Error(ErrorKind::kSystem, "a peer's shared memory is not sealed against shrinking");
  }
  struct stat info{};
  if (::fstat(descriptor.get(), &info) != 0) throw system_error("fstat of a peer's shared memory", errno);
  if (info.st_size != static_cast<off_t>(size)) {
    throw Error(ErrorKind::kSystem, "a peer's shared memory has " + std::to_string(info.st_size) +
                                        " bytes, expected " + std::to_string(size));
  }
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  std::byte* data = map_shared(descriptor.get(), size, protection);
  if (data == nullptr) throw system_error("mapping a peer's shared memory", errno);
  // A core dump of ours need not hold the peers' tensors.
  if (access == Access::kReadWrite) ::madvise(data, size, MADV_DONTDUMP);
  Segment segment;
  segment.data_ = data;
  segment.size_ = size;
  return segment;
}

}  // namespace fccl::cpu
