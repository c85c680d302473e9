// Of torch's kernels those that fill a tensor with a value, those that copy one with gaps, and the one that
// waits (torch.cuda._sleep). Tests move everything else to the CPU.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels.h"

namespace fccl::sim {
namespace {

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// vectorized_elementwise_kernel<n, FillFunctor<T>, std::array<char*, 1>>(int count, FillFunctor<T> value,
// data)
std::function<void()> prepare_fill(std::size_t size, void** parameters) {
  const auto count = static_cast<std::size_t>(*static_cast<const int*>(parameters[0]));
  const auto* const value = static_cast<const std::byte*>(parameters[1]);
  std::byte* const to = *static_cast<std::byte* const*>(parameters[2]);
  return [count, to, value = std::vector<std::byte>(value, value + size)] {
    for (std::size_t i = 0; i < count; ++i) std::memcpy(to + i * value.size(), value.data(), value.size());
  };
}

// elementwise_kernel<threads, n, functor>(int count, functor), whose functor holds, as ATen/native/cuda has
// it in CUDALoops.cuh and OffsetCalculator.cuh: how an index becomes two offsets, and the two tensors.
struct StridedCopy {
  static constexpr int kMaxDims = 25;
  struct Divider {
    std::uint32_t divisor, multiplier, shift;
  };
  int dims;
  Divider sizes[kMaxDims];
  std::uint32_t strides[kMaxDims][2];  // of output and input, in bytes
  std::byte* data[2];
};

std::function<void()> prepare_strided_copy(std::size_t size, void** parameters) {
  const int count = *static_cast<const int*>(parameters[0]);
  StridedCopy copy;
  std::memcpy(&copy, parameters[1], sizeof(copy));
  std::int64_t elements = 1;
  for (int dim = 0; dim < copy.dims && dim < StridedCopy::kMaxDims; ++dim)
    elements *= copy.sizes[dim].divisor;
  if (copy.dims < 1 || copy.dims > StridedCopy::kMaxDims || elements != count) {
    std::fprintf(stderr, "simulated CUDA: this torch lays out elementwise_kernel in another way\n");
    std::abort();
  }
  return [count, size, copy] {
    for (int i = 0; i < count; ++i) {
      std::size_t offsets[2] = {0, 0};
      std::uint32_t index = static_cast<std::uint32_t>(i);
      for (int dim = 0; dim < copy.dims; ++dim) {
        const std::uint32_t at = index % copy.sizes[dim].divisor;
        index /= copy.sizes[dim].divisor;
        for (int which = 0; which < 2; ++which) offsets[which] += std::size_t{at} * copy.strides[dim][which];
      }
      std::memcpy(copy.data[0] + offsets[0], copy.data[1] + offsets[1], size);
    }
  };
}

std::function<void()> prepare_sleep(void** parameters) {
  const auto nanoseconds = std::chrono::nanoseconds(*static_cast<const std::int64_t*>(parameters[0]));
  return [nanoseconds] { std::this_thread::sleep_for(nanoseconds); };
}

}  // namespace

Prepare find_torch_kernel(const std::string& name) {
  if (contains(name, "spin_kernel(long)"))
    return [](const Grid&, void** parameters) { return prepare_sleep(parameters); };
  const bool fills = contains(name, "at::native::vectorized_elementwise_kernel<");
  const bool copies = contains(name, "at::native::elementwise_kernel<") &&
                      contains(name, "gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(");
  if (!fills && !copies) return {};
  constexpr struct {
    const char* type;
    std::size_t size;
  } kTypes[] = {{"double", 8},    {"float", 4},       {"long", 8},          {"int", 4},
                {"short", 2},     {"signed char", 1}, {"unsigned char", 1}, {"c10::BFloat16", 2},
                {"c10::Half", 2}, {"bool", 1}};
  for (const auto& each : kTypes) {
    const std::string type = each.type;
    if (fills && contains(name, (", at::native::FillFunctor<" + type + ">").c_str()))
      return [size = each.size](const Grid&, void** parameters) { return prepare_fill(size, parameters); };
    if (copies && contains(name, ("{lambda(" + type + ")#1}>").c_str()))
      return [size = each.size](const Grid&, void** parameters) {
        return prepare_strided_copy(size, parameters);
      };
  }
  return {};
}

}  // namespace fccl::sim
