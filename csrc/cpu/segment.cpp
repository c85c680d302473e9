#include "cpu/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "common/error.h"
#include "cpu/environment.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace fccl::cpu {

void Descriptor::reset() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

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
  int error = 0;
  do {
    error = ::posix_fallocate(descriptor_.get(), static_cast<off_t>(offset), static_cast<off_t>(size));
  } while (error == EINTR);
  if (error != 0) throw system_error("allocating " + std::to_string(size) + " bytes of shared memory", error);
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
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) throw system_error("mapping shared memory", errno);
  segment.data_ = static_cast<std::byte*>(data);
  segment.size_ = size;
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
  void* data = ::mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, descriptor.get(), 0);
  if (data == MAP_FAILED) throw system_error("mapping a peer's shared memory", errno);
  // A core dump of ours need not hold the peers' tensors.
  if (access == Access::kReadWrite) ::madvise(data, size, MADV_DONTDUMP);
  Segment segment;
  segment.data_ = static_cast<std::byte*>(data);
  segment.size_ = size;
  return segment;
}

}  // namespace fccl::cpu
