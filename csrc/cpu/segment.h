// Anonymous shared memory that is passed by descriptor.
//
// A memfd has no name in /dev/shm: it works in a container whose /dev/shm holds 64 MB and leaves
// nothing behind when its processes are killed. It is sealed against shrinking, because a mapping
// of a file that shrinks raises SIGBUS in whoever reads it, and its blocks are allocated before anybody uses
// them, because touching a hole that cannot be filled raises SIGBUS too.
#pragma once

#include <cstddef>
#include <utility>

#include "common/descriptor.h"
#include "cpu/environment.h"

namespace fccl::cpu {

class Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // Makes a segment of `size` bytes, mapped for reading and writing, without memory: allocate() or the caller
  // (arena.cpp) puts some under each part before anybody uses it. Throws Error (kSystem).
  static Segment reserve(std::size_t size);
  // Puts memory, zeroed, under a part. Throws Error (kSystem) if memory is short: the cgroup's limit and
  // available memory are looked at first, since the kernel answers a memfd that exceeds them by killing a
  // process, not by an error. Needs the descriptor.
  void allocate(std::size_t offset, std::size_t size);
  // As allocate(), without that look and without exceptions: 0 or an errno, after which some of the part may
  // have memory. On large pages where the system offers them and the part holds whole ones.
  int put_memory(std::size_t offset, std::size_t size) noexcept;
  int put_memory(std::size_t offset, std::size_t size, LargePages offer) noexcept;  // as if that were offered
  // reserve() and allocate() of the whole.
  static Segment create(std::size_t size);

  enum class Access { kRead, kReadWrite };
  // Maps a descriptor that came from another process. For reading only unless it is an arena: a peer's
  // words are the peer's to write, and the MMU holds us to that. Throws if the file is not sealed against
  // shrinking or does not have exactly `size` bytes.
  static Segment open(const Descriptor& descriptor, std::size_t size, Access access = Access::kRead);

  // Aligned to kLargePage if the segment is as large as one.
  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  // Valid for segments made here.
  const Descriptor& descriptor() const noexcept { return descriptor_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  Descriptor descriptor_;
};

}  // namespace fccl::cpu
