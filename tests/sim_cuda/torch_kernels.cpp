// Of torch's kernels those that fill a tensor with a value, and the one that waits (torch.cuda._sleep). Tests
// move everything else to the CPU, so copies are all they need besides.
#include <chrono>
#include <cstddef>
#include <cstdint>
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

std::function<void()> prepare_sleep(void** parameters) {
  const auto nanoseconds = std::chrono::nanoseconds(*static_cast<const std::int64_t*>(parameters[0]));
  return [nanoseconds] { std::this_thread::sleep_for(nanoseconds); };
}

}  // namespace

Prepare find_torch_kernel(const std::string& name) {
  if (contains(name, "spin_kernel(long)"))
    return [](const Grid&, void** parameters) { return prepare_sleep(parameters); };
  if (!contains(name, "at::native::vectorized_elementwise_kernel<")) return {};
  constexpr struct {
    const char* type;
    std::size_t size;
  } kTypes[] = {{"double", 8},    {"float", 4},       {"long", 8},          {"int", 4},
                {"short", 2},     {"signed char", 1}, {"unsigned char", 1}, {"c10::BFloat16", 2},
                {"c10::Half", 2}, {"bool", 1}};
  for (const auto& each : kTypes) {
    if (contains(name, (std::string(", at::native::FillFunctor<") + each.type + ">").c_str()))
      return [size = each.size](const Grid&, void** parameters) { return prepare_fill(size, parameters); };
  }
  return {};
}

}  // namespace fccl::sim
