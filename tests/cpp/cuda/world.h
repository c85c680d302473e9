// Ranks whose GPUs are this CPU: their workspaces, and sequences of calls run on them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/all_reduce.h"
#include "cuda/gather_broadcast.h"
#include "cuda/launcher.h"
#include "reference.h"

namespace fccl::cuda::host {

// Zeroed memory that forked children share.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes) : bytes_(bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(at);
  }
  ~SharedMemory() { munmap(data_, bytes_); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::size_t bytes_;
  std::byte* data_;
};

class World {
 public:
  World(int size, std::size_t half_bytes, std::uint64_t first_generation = 1)
      : size_(size), half_bytes_(half_bytes), memory_(static_cast<std::size_t>(size) * stride()) {
    for (int rank = 0; rank < size; ++rank) control(rank).generation = first_generation;
  }

  int size() const { return size_; }
  Control& control(int rank) const { return *reinterpret_cast<Control*>(workspace(rank)); }
  Status& status(int rank) const {
    return *reinterpret_cast<Status*>(workspace(rank) + workspace_bytes(half_bytes_));
  }

  Session session(int rank, std::uint64_t description = 0, std::uint64_t timeout_ns = 60'000'000'000) const {
    Session session{};
    for (int peer = 0; peer < size_; ++peer) session.workspace[peer] = workspace(peer);
    session.half_bytes = half_bytes_;
    session.description = description;
    session.timeout_ns = timeout_ns;
    session.status = &status(rank);
    session.rank = rank;
    session.world = size_;
    return session;
  }

 private:
  std::size_t stride() const { return (workspace_bytes(half_bytes_) + sizeof(Status) + 4095) / 4096 * 4096; }
  std::byte* workspace(int rank) const { return memory_.data() + static_cast<std::size_t>(rank) * stride(); }

  const int size_;
  const std::size_t half_bytes_;
  SharedMemory memory_;
};

enum class Kind { kOneShot, kTwoShot, kAllGather, kBroadcast };
inline const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kOneShot: return "one-shot all_reduce";
    case Kind::kTwoShot: return "two-shot all_reduce";
    case Kind::kAllGather: return "all_gather";
    case Kind::kBroadcast: return "broadcast";
  }
  return "?";
}

struct Call {
  Kind kind = Kind::kOneShot;
  ReduceOp op = ReduceOp::kSum;
  std::size_t count = 1;
  unsigned blocks = 1;
  unsigned threads = 8;  // no fewer than ranks
  int root = 0;
  std::size_t offset = 0;  // of input and output from a 16-byte boundary, in elements
  bool in_place = false;
  std::uint64_t seed = 0;  // of the input's values

  std::string text() const {
    return std::string(name_of(kind)) + " " + fccl::name_of(op) + " of " + std::to_string(count) +
           ", offset " + std::to_string(offset) + (in_place ? ", in place, " : ", ") +
           std::to_string(blocks) + " blocks of " + std::to_string(threads);
  }
};

// How elements look on the host, and what their reduction should give.
template <class Element>
struct HostElement {
  using Stored = typename Element::Accumulator;
  static Stored make(double value) { return static_cast<Stored>(value); }
  static Stored reduce(ReduceOp op, const std::vector<Stored>& values) {
    const int divisor = static_cast<int>(values.size());
    if constexpr (is_float<Element>) {
      return reference::reduce_float<Stored>(op, values, divisor);
    } else {
      return reference::reduce_integer<Stored>(op, values, divisor);
    }
  }
};
template <class Format, const reference::Format16& kFormat>
struct HostElement16 {
  using Stored = std::uint16_t;
  static Stored make(double value) { return kFormat.encode(static_cast<float>(value)); }
  static Stored reduce(ReduceOp op, const std::vector<Stored>& values) {
    std::vector<float> wide;
    for (const Stored value : values) wide.push_back(static_cast<float>(kFormat.decode(value)));
    return kFormat.encode(reference::reduce_float<float>(op, wide, static_cast<int>(values.size())));
  }
};
template <>
struct HostElement<Float16> : HostElement16<Float16, reference::kHalf> {};
template <>
struct HostElement<BFloat16> : HostElement16<BFloat16, reference::kBFloat16> {};

// One rank's side of one call: its tensors, and whether the output is right.
template <class Element>
class Tensors {
 public:
  using Host = HostElement<Element>;
  using Stored = typename Host::Stored;

  Tensors(const Call& call, int rank, int world) : call_(call), rank_(rank), world_(world) {
    const std::size_t out =
        call.kind == Kind::kAllGather ? call.count * static_cast<std::size_t>(world) : call.count;
    output_.assign(call.offset + out + kGuard, guard());
    const std::vector<Stored> mine = values(rank);
    if (call.kind == Kind::kBroadcast) {
      std::copy(mine.begin(), mine.end(), output());
    } else if (call.in_place) {
      std::copy(mine.begin(), mine.end(), in_place_at());
    } else {
      input_.assign(call.offset + call.count, Stored{});
      std::copy(mine.begin(), mine.end(), input_.begin() + static_cast<std::ptrdiff_t>(call.offset));
    }
  }

  const std::byte* input() const {
    const Stored* at = call_.in_place ? in_place_at() : input_.data() + call_.offset;
    return reinterpret_cast<const std::byte*>(at);
  }
  Stored* output() { return output_.data() + call_.offset; }
  std::byte* output_bytes() { return reinterpret_cast<std::byte*>(output()); }
  std::uint64_t bytes() const { return call_.count * sizeof(Stored); }
  // What the tensors lie in, for who must take them to another memory and back. (In place there is no other
  // input.)
  std::span<std::byte> input_memory() { return std::as_writable_bytes(std::span(input_)); }
  std::span<std::byte> output_memory() { return std::as_writable_bytes(std::span(output_)); }

  // Empty if right.
  std::string complaint() {
    std::vector<std::vector<Stored>> all;
    for (int rank = 0; rank < world_; ++rank) all.push_back(values(rank));
    std::vector<Stored> expected;
    if (call_.kind == Kind::kAllGather) {
      for (const auto& one : all) expected.insert(expected.end(), one.begin(), one.end());
    } else if (call_.kind == Kind::kBroadcast) {
      expected = all[static_cast<std::size_t>(call_.root)];
    } else {
      for (std::size_t i = 0; i < call_.count; ++i) {
        std::vector<Stored> column;
        for (const auto& one : all) column.push_back(one[i]);
        expected.push_back(Host::reduce(call_.op, column));
      }
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (std::memcmp(&output()[i], &expected[i], sizeof(Stored)) != 0) {
        return call_.text() + ": rank " + std::to_string(rank_) + " has a wrong element " + std::to_string(i);
      }
    }
    for (std::size_t i = 0; i < output_.size(); ++i) {
      const bool inside = i >= call_.offset && i < call_.offset + expected.size();
      const Stored untouched = guard();
      if (!inside && std::memcmp(&output_[i], &untouched, sizeof(Stored)) != 0) {
        return call_.text() + ": rank " + std::to_string(rank_) + " wrote outside its output";
      }
    }
    return "";
  }

 private:
  static constexpr std::size_t kGuard = 20;
  static Stored guard() { return Host::make(77); }
  Stored* in_place_at() {
    return output() + (call_.kind == Kind::kAllGather ? static_cast<std::size_t>(rank_) * call_.count : 0);
  }
  const Stored* in_place_at() const { return const_cast<Tensors*>(this)->in_place_at(); }

  // What the rank puts in: numbers of all sizes, and for floats NaN, inf and zeros of both signs now and
  // then.
  std::vector<Stored> values(int rank) const {
    std::mt19937_64 random(call_.seed * 1000 + static_cast<std::uint64_t>(rank));
    std::vector<Stored> result;
    for (std::size_t i = 0; i < call_.count; ++i) {
      const auto bits = static_cast<std::uint32_t>(random());
      double value = std::ldexp(static_cast<double>(static_cast<std::int32_t>(bits)), -24);
      if constexpr (is_float<Element>) {
        const std::uint32_t kind = static_cast<std::uint32_t>(random() % 64);
        if (kind == 0) value = -0.0;
        if (kind == 1) value = INFINITY;
        if (kind == 2) value = std::nan("");
      }
      result.push_back(Host::make(value));
    }
    return result;
  }

  const Call call_;
  const int rank_;
  const int world_;
  // Sixteen-byte aligned, since operator new is; Stored is trivial.
  std::vector<Stored> input_;
  std::vector<Stored> output_;
};

// What all ranks must agree on. (Tests need no more of the real description than that.)
inline std::uint64_t description_of(const Call& call, DType dtype) {
  return static_cast<std::uint64_t>(call.kind) | static_cast<std::uint64_t>(dtype) << 4 |
         static_cast<std::uint64_t>(call.op) << 9 | static_cast<std::uint64_t>(call.root) << 13 |
         static_cast<std::uint64_t>(call.count) << 16;
}

template <class Element, class Faults = NoFaults>
void add_call(Launcher& launcher, int stream, const Session& session, const Call& call,
              Tensors<Element>& tensors) {
  switch (call.kind) {
    case Kind::kOneShot:
      launcher.add<OneShotAllReduce<Element, Faults>>(
          stream, call.blocks, call.threads,
          {session, tensors.input(), tensors.output_bytes(), tensors.bytes(), call.op});
      break;
    case Kind::kTwoShot:
      launcher.add<TwoShotAllReduce<Element, Faults>>(
          stream, call.blocks, call.threads,
          {session, tensors.input(), tensors.output_bytes(), tensors.bytes(), call.op});
      break;
    case Kind::kAllGather:
      launcher.add<OneShotAllGather<Element, Faults>>(
          stream, call.blocks, call.threads,
          {session, tensors.input(), tensors.output_bytes(), tensors.bytes()});
      break;
    case Kind::kBroadcast:
      launcher.add<Broadcast<Element, Faults>>(stream, call.blocks, call.threads,
                                               {session, tensors.output_bytes(), tensors.bytes(), call.root});
      break;
  }
}

// One rank's launches, one for each call.
template <class Element, class Faults = NoFaults>
std::vector<std::unique_ptr<Tensors<Element>>> add_calls(Launcher& launcher, int stream, const World& world,
                                                         int rank, const std::vector<Call>& calls) {
  std::vector<std::unique_ptr<Tensors<Element>>> all;
  for (const Call& call : calls) {
    all.push_back(std::make_unique<Tensors<Element>>(call, rank, world.size()));
    add_call<Element, Faults>(launcher, stream, world.session(rank, description_of(call, Element::kDType)),
                              call, *all.back());
  }
  return all;
}

// Calls of all kinds, with grids that differ from one to the next.
inline std::vector<Call> random_calls(std::uint64_t seed, int world, std::size_t count,
                                      std::size_t most_elements) {
  std::mt19937_64 random(seed);
  const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin,
                               ReduceOp::kMax};
  std::vector<Call> calls;
  for (std::size_t i = 0; i < count; ++i) {
    Call call;
    call.kind = static_cast<Kind>(below(4));
    call.op = kOps[below(5)];
    call.count = 1 + below(most_elements);
    call.blocks = static_cast<unsigned>(1 + below(3));
    call.threads = static_cast<unsigned>(8 + below(5));
    call.root = static_cast<int>(below(static_cast<std::size_t>(world)));
    call.offset = below(3);
    call.in_place = below(2) == 0;
    call.seed = random();
    calls.push_back(call);
  }
  return calls;
}

}  // namespace fccl::cuda::host
