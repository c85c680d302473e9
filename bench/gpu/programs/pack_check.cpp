// Tensors of many lengths and alignments, with gaps between them in the buffer, packed and unpacked with and
// without a scale, between all pairs of types that are built: the bits of a plain loop, and not a byte
// beside.
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "cuda/pack.h"
#include "numbers.h"

namespace fccl::gpu_check {
namespace {

using cuda::PackKernel;
using cuda::Range;
using cuda::RangeTable;

constexpr std::size_t kGuard = 16;  // elements around everything that nobody may touch

struct Shape {
  struct Tensor {
    std::size_t length = 0;
    std::size_t gap = 0;         // elements of the buffer before it
    std::size_t misaligned = 0;  // by how many elements it misses a 16-byte boundary in its own memory
  };
  std::vector<Tensor> tensors;
  std::size_t gap_behind = 0;
  std::size_t buffer_misaligned = 0;
};

// Where the tensors of a shape lie: in one piece of memory, and in the buffer.
struct Places {
  explicit Places(const Shape& shape) {
    for (const Shape::Tensor& one : shape.tensors) {
      const std::size_t begin = (elements + kGuard) / 8 * 8 + 8 + one.misaligned;
      begins.push_back(begin);
      elements = begin + one.length;
      buffer_length += one.gap;
      firsts.push_back(buffer_length);
      buffer_length += one.length;
    }
    elements += kGuard;
    buffer_length += shape.gap_behind;
  }
  std::vector<std::size_t> begins;
  std::vector<std::uint64_t> firsts;
  std::size_t elements = 0;
  std::uint64_t buffer_length = 0;
};

template <class Type>
RangeTable put_ranges(Machine& machine, const Shape& shape, const Places& places,
                      typename Type::Stored* memory) {
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < shape.tensors.size(); ++i) {
    ranges.push_back({reinterpret_cast<std::byte*>(memory + places.begins[i]), nullptr,
                      shape.tensors[i].length, places.firsts[i]});
  }
  return {machine.put(ranges), static_cast<std::uint32_t>(ranges.size())};
}

template <class Type>
std::vector<typename Type::Stored> random_elements(Numbers& numbers, std::size_t count) {
  std::vector<typename Type::Stored> elements;
  for (std::size_t i = 0; i < count; ++i) elements.push_back(Type::narrow(numbers.next()));
  return elements;
}

template <class From, class To>
typename To::Stored cast(typename From::Stored element, std::optional<float> scale) {
  float value = From::widen(element);
  if (scale) {
    value = value * *scale;
    if (std::isnan(value)) value = __builtin_bit_cast(float, 0x7fc00000u);
  }
  return To::narrow(value);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class From, class To>
std::string check_one_pack(Machine& machine, const Shape& shape, std::optional<float> scale, Grid grid,
                           std::uint64_t seed) {
  Numbers numbers(seed);
  const Places places(shape);
  const auto memory = random_elements<From>(numbers, places.elements);
  const std::size_t begin = kGuard + shape.buffer_misaligned;
  std::vector<typename To::Stored> buffer(begin + places.buffer_length + kGuard, To::narrow(55));
  auto wanted = buffer;
  for (std::size_t at = 0; at < places.buffer_length; ++at) wanted[begin + at] = To::narrow(0);
  for (std::size_t i = 0; i < shape.tensors.size(); ++i) {
    for (std::size_t k = 0; k < shape.tensors[i].length; ++k)
      wanted[begin + places.firsts[i] + k] = cast<From, To>(memory[places.begins[i] + k], scale);
  }
  auto* const on_machine = machine.put(memory);
  auto* const packed = machine.put(buffer);
  const float* const factor = scale ? machine.put(std::vector<float>{*scale}) : nullptr;
  machine.launch(
      0, cuda::find_kernel(PackKernel::kPack, From::kDType, To::kDType), grid,
      cuda::PackTensorsArgs{put_ranges<From>(machine, shape, places, on_machine),
                            reinterpret_cast<std::byte*>(packed + begin), places.buffer_length, factor});
  machine.finish();
  if (!same_bits(machine.get(packed, buffer.size()), wanted)) return "pack: the buffer differs";
  return same_bits(machine.get(on_machine, memory.size()), memory) ? "" : "pack: a tensor was written to";
}

template <class From, class To>
std::string check_one_unpack(Machine& machine, const Shape& shape, std::optional<float> scale, Grid grid,
                             std::uint64_t seed) {
  Numbers numbers(seed);
  const Places places(shape);
  const std::size_t begin = kGuard + shape.buffer_misaligned;
  const auto buffer = random_elements<From>(numbers, begin + places.buffer_length + kGuard);
  const std::vector<typename To::Stored> memory(places.elements, To::narrow(77));
  auto wanted = memory;
  std::uint32_t any = 0;
  for (std::size_t i = 0; i < shape.tensors.size(); ++i) {
    for (std::size_t k = 0; k < shape.tensors[i].length; ++k) {
      const auto element = cast<From, To>(buffer[begin + places.firsts[i] + k], scale);
      wanted[places.begins[i] + k] = element;
      if (!std::isfinite(To::widen(element))) any = 1;
    }
  }
  auto* const on_machine = machine.put(memory);
  auto* const packed = machine.put(buffer);
  const float* const factor = scale ? machine.put(std::vector<float>{*scale}) : nullptr;
  std::uint32_t* const flag = machine.put(std::vector<std::uint32_t>{0});
  machine.launch(0, cuda::find_kernel(PackKernel::kUnpack, From::kDType, To::kDType), grid,
                 cuda::UnpackTensorsArgs{put_ranges<To>(machine, shape, places, on_machine),
                                         reinterpret_cast<const std::byte*>(packed + begin),
                                         places.buffer_length, factor, flag});
  machine.finish();
  if (!same_bits(machine.get(on_machine, memory.size()), wanted)) return "unpack: a tensor differs";
  if (machine.get(flag, 1)[0] != any) return "unpack: the flag for inf and NaN is wrong";
  return same_bits(machine.get(packed, buffer.size()), buffer) ? "" : "unpack: the buffer was written to";
}

std::vector<Shape> shapes_for(const Machine& machine, const Effort& effort) {
  std::vector<Shape> shapes = {
      {{{512}, {1024}, {8}, {1536}, {2000}, {64}}},
      {{{1}, {3, 0, 1}, {700}, {512, 0, 2}, {513, 0, 3}, {5}, {2049, 0, 1}, {511}, {1027}}, 0, 1},
      {{{0}, {600, 8}, {600, 520}, {0, 4}, {5, 3}, {1024, 3}}, 1030},
      {{}, 1300},
  };
  Shape many;
  for (std::size_t i = 0; i < 300; ++i) many.tensors.push_back({i % 6, i % 11 == 0 ? i % 3 : 0, i % 5});
  shapes.push_back(many);
  if (machine.is_fast() && !effort.small) {
    Shape large;
    for (std::size_t i = 0; i < 50; ++i) large.tensors.push_back({4096 * (1 + i % 7) + i % 3, i % 4, i % 2});
    shapes.push_back(large);
  }
  return shapes;
}

template <class From, class To>
void check_pair(Machine& machine, const Effort& effort, Report& report) {
  const std::optional<float> scales[] = {std::nullopt, 1.0f / 3, 3e38f, 1e-38f};
  std::uint64_t number = 0;
  for (const Shape& shape : shapes_for(machine, effort)) {
    for (const std::optional<float>& scale : scales) {
      ++number;
      if (!machine.is_fast() && number % 2 == 0) continue;
      const Grid grid = machine.is_fast()
                            ? Grid{1 + static_cast<unsigned>(number * 37 % machine.multiprocessors()), 256}
                            : Grid{2, 64};
      const std::string what = std::string(fccl::name_of(From::kDType)) + " to " + fccl::name_of(To::kDType) +
                               ", shape and scale " + std::to_string(number);
      report.add(what, check_one_pack<From, To>(machine, shape, scale, grid, effort.seed + number));
      report.add(what, check_one_unpack<From, To>(machine, shape, scale, grid, effort.seed + number));
      machine.release_all();
    }
  }
}

}  // namespace

void check_pack(Machine& machine, const Effort& effort, Report& report) {
  using cuda::BFloat16Source;
  using cuda::Float16Source;
  using cuda::FloatSource;
  check_pair<FloatSource, FloatSource>(machine, effort, report);
  check_pair<FloatSource, Float16Source>(machine, effort, report);
  check_pair<FloatSource, BFloat16Source>(machine, effort, report);
  check_pair<Float16Source, FloatSource>(machine, effort, report);
  check_pair<Float16Source, Float16Source>(machine, effort, report);
  check_pair<BFloat16Source, FloatSource>(machine, effort, report);
  check_pair<BFloat16Source, BFloat16Source>(machine, effort, report);
}

}  // namespace fccl::gpu_check
