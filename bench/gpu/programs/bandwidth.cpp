// The bucket and packing kernels only move memory: each byte is read once and written once, so a copy of as
// many bytes is the floor. Both are in one graph, under the same clocks, and over buffers that together are
// far larger than the second-level cache, so that every pass finds its bytes in memory.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "codec/block.h"
#include "codec/bucket_layout.h"
#include "cuda/bucket_kernels.h"
#include "cuda/kernels.h"
#include "cuda/pack.h"
#include "measure.h"
#include "timing.h"

namespace fccl::gpu_check {
namespace {

using codec::BlockFormat;
using codec::BucketLayout;
using cuda::BucketKernel;
using cuda::KernelEntry;
using cuda::PackKernel;
using cuda::Range;
using cuda::RangeTable;

constexpr int kWorld = 8;
constexpr std::uint64_t kParameter = std::uint64_t{1} << 20;  // elements, of each parameter of the bucket
constexpr std::uint64_t kCacheBytes = std::uint64_t{256}
                                      << 20;  // more than any second-level cache twice over
constexpr double kGoal = 0.9;

// One pass of a kernel over buffers of its own.
struct Pass {
  std::vector<std::unique_ptr<DeviceMemory>> memory;
  std::vector<std::byte> args;
  KernelEntry kernel;

  std::byte* allocate(std::uint64_t bytes) {
    memory.push_back(std::make_unique<DeviceMemory>(bytes));
    return memory.back()->data();
  }
  template <class T>
  T* put(const std::vector<T>& values) {
    auto* const at = reinterpret_cast<T*>(allocate(values.size() * sizeof(T)));
    check(cudaMemcpy(at, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return at;
  }
  template <class Args>
  void set_args(const Args& value) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
    args.assign(bytes, bytes + sizeof(value));
  }
  // Parameters one behind the other in `data`; `unit`: what Range::first counts, in elements.
  RangeTable put_ranges(std::byte* data, float* remainders, std::uint64_t elements,
                        std::uint64_t element_bytes, std::uint64_t unit) {
    std::vector<Range> ranges;
    for (std::uint64_t at = 0; at < elements; at += kParameter) {
      ranges.push_back({data + at * element_bytes, remainders != nullptr ? remainders + at : nullptr,
                        std::min(kParameter, elements - at), at / unit});
    }
    return {put(ranges), static_cast<std::uint32_t>(ranges.size())};
  }
};

// A kind of pass: how to make one over `elements` elements, and what it moves then.
struct Subject {
  std::string name;
  std::function<Pass(std::uint64_t elements)> make;
  std::function<double(std::uint64_t elements)> moved;  // bytes, read and written
};

struct Coding {
  std::string name;
  BlockFormat format;
  std::uint32_t block;
  int code_bytes;
  bool scaled;

  BucketLayout layout(std::uint64_t elements) const {
    return BucketLayout::make(BucketLayout::blocks_of(elements, block), 0, block, code_bytes, scaled, kWorld);
  }
  double bytes_per_element() const { return code_bytes + (scaled ? 4.0 / block : 0.0); }
};

std::uint64_t size_in_memory(DType dtype) { return size_of(dtype); }

Subject encode_of(const Coding& coding, DType gradients, bool feedback) {
  const double source = static_cast<double>(size_in_memory(gradients));
  return {std::string("encode ") + name_of(gradients) + " to " + coding.name +
              (feedback ? ", error feedback" : ""),
          [=](std::uint64_t elements) {
            Pass pass;
            pass.kernel = cuda::find_kernel(BucketKernel::kEncode, gradients, coding.format, coding.block);
            std::byte* const data = pass.allocate(elements * size_in_memory(gradients));
            auto* const remainders =
                feedback ? reinterpret_cast<float*>(pass.allocate(elements * sizeof(float))) : nullptr;
            const BucketLayout layout = coding.layout(elements);
            std::byte* const wire = pass.allocate(layout.world * layout.shard_bytes());
            pass.set_args(cuda::EncodeBucketArgs{
                layout,
                pass.put_ranges(data, remainders, elements, size_in_memory(gradients), coding.block),
                {},
                wire});
            return pass;
          },
          [=](std::uint64_t elements) {
            return static_cast<double>(elements) * (source + coding.bytes_per_element() + (feedback ? 8 : 0));
          }};
}

Subject reduce_of(const Coding& coding, bool feedback) {
  return {
      "reduce " + coding.name + ", " + std::to_string(kWorld) + " ranks" +
          (feedback ? ", error feedback" : ""),
      [=](std::uint64_t elements) {
        Pass pass;
        pass.kernel = cuda::find_kernel(BucketKernel::kReduce, DType::kFloat32, coding.format, coding.block);
        const BucketLayout layout = coding.layout(elements);
        // Of the bucket itself only the remainders are touched, those of the own shard.
        std::byte* const data = pass.allocate(1);
        auto* const remainders =
            feedback ? reinterpret_cast<float*>(pass.allocate(elements * sizeof(float))) : nullptr;
        const float* const divisor = pass.put(std::vector<float>{static_cast<float>(kWorld)});
        std::byte* const wires = pass.allocate(layout.world * layout.shard_bytes());
        std::byte* const out = pass.allocate(layout.shard_bytes());
        pass.set_args(cuda::ReduceShardArgs{
            layout, pass.put_ranges(data, remainders, elements, 0, coding.block), wires, out, divisor, 0});
        return pass;
      },
      [=](std::uint64_t elements) {
        const double shard = static_cast<double>(elements) / kWorld;
        return shard * ((kWorld + 1) * coding.bytes_per_element() + (feedback ? 8 : 0));
      }};
}

Subject decode_of(const Coding& coding, DType gradients) {
  const double target = static_cast<double>(size_in_memory(gradients));
  return {"decode " + coding.name + " to " + name_of(gradients),
          [=](std::uint64_t elements) {
            Pass pass;
            pass.kernel = cuda::find_kernel(BucketKernel::kDecode, gradients, coding.format, coding.block);
            std::byte* const data = pass.allocate(elements * size_in_memory(gradients));
            const BucketLayout layout = coding.layout(elements);
            std::byte* const wire = pass.allocate(layout.world * layout.shard_bytes());
            pass.set_args(cuda::DecodeBucketArgs{
                layout,
                pass.put_ranges(data, nullptr, elements, size_in_memory(gradients), coding.block),
                {},
                wire,
                reinterpret_cast<std::uint32_t*>(pass.allocate(sizeof(std::uint32_t)))});
            return pass;
          },
          [=](std::uint64_t elements) {
            return static_cast<double>(elements) * (target + coding.bytes_per_element());
          }};
}

Subject pack_of(PackKernel which, DType from, DType to) {
  const bool packs = which == PackKernel::kPack;
  return {std::string(packs ? "pack " : "unpack ") + name_of(from) + " to " + name_of(to),
          [=](std::uint64_t elements) {
            Pass pass;
            pass.kernel = cuda::find_kernel(which, from, to);
            const std::uint64_t of_tensors = size_in_memory(packs ? from : to);
            std::byte* const tensors = pass.allocate(elements * of_tensors);
            std::byte* const buffer = pass.allocate(elements * size_in_memory(packs ? to : from));
            const RangeTable table = pass.put_ranges(tensors, nullptr, elements, of_tensors, 1);
            const float* const scale = pass.put(std::vector<float>{0.5f});
            if (packs) {
              pass.set_args(cuda::PackTensorsArgs{table, buffer, elements, scale});
            } else {
              pass.set_args(cuda::UnpackTensorsArgs{table, buffer, elements, scale, nullptr});
            }
            return pass;
          },
          [=](std::uint64_t elements) {
            return static_cast<double>(elements) *
                   static_cast<double>(size_in_memory(from) + size_in_memory(to));
          }};
}

std::vector<Subject> all_subjects() {
  const Coding int8{"int8/256", BlockFormat::kInt8, 256, 1, true};
  const Coding e4m3{"fp8_e4m3/256", BlockFormat::kFloat8E4M3, 256, 1, true};
  const Coding e5m2{"fp8_e5m2/256", BlockFormat::kFloat8E5M2, 256, 1, true};
  const Coding half{"float16/256", BlockFormat::kFloat16, 256, 2, true};
  const Coding bfloat{"bfloat16", BlockFormat::kBFloat16, 256, 2, false};
  std::vector<Subject> all;
  for (const Coding& coding : {int8, e4m3, e5m2, half, bfloat}) {
    all.push_back(encode_of(coding, DType::kFloat32, false));
    all.push_back(reduce_of(coding, false));
    all.push_back(decode_of(coding, DType::kFloat32));
  }
  all.push_back(encode_of(int8, DType::kFloat32, true));
  all.push_back(encode_of(e4m3, DType::kFloat32, true));
  all.push_back(reduce_of(int8, true));
  for (const std::uint32_t block : {128u, 512u, 1024u}) {
    const Coding coding{"int8/" + std::to_string(block), BlockFormat::kInt8, block, 1, true};
    all.push_back(encode_of(coding, DType::kFloat32, false));
    all.push_back(reduce_of(coding, false));
    all.push_back(decode_of(coding, DType::kFloat32));
  }
  for (const DType gradients : {DType::kFloat16, DType::kBFloat16}) {
    all.push_back(encode_of(int8, gradients, false));
    all.push_back(decode_of(int8, gradients));
  }
  all.push_back(pack_of(PackKernel::kPack, DType::kFloat32, DType::kFloat32));
  all.push_back(pack_of(PackKernel::kPack, DType::kFloat32, DType::kBFloat16));
  all.push_back(pack_of(PackKernel::kUnpack, DType::kFloat32, DType::kFloat32));
  all.push_back(pack_of(PackKernel::kUnpack, DType::kBFloat16, DType::kFloat32));
  return all;
}

// As many blocks as are resident at once: the kernels go through their work in strides of the grid.
unsigned whole_device(const KernelEntry& kernel) {
  int per_multiprocessor = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel.entry, kernel.threads, 0),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return static_cast<unsigned>(per_multiprocessor * properties.multiProcessorCount);
}

struct Rates {
  double kernel = 0;  // GB/s, read and written
  double copy = 0;
  double share = 0;  // the median over replays of the two's ratio
};

Rates measure(const Subject& subject, std::uint64_t elements, int replays) {
  const double moved = subject.moved(elements);
  // A copy moves each byte twice: out of memory, and into it.
  const auto copied = static_cast<std::uint64_t>(moved / 2);
  const auto passes = static_cast<std::size_t>(std::max(3.0, static_cast<double>(kCacheBytes) / moved + 1));
  std::vector<Pass> all;
  std::vector<std::unique_ptr<DeviceMemory>> sources;
  std::vector<std::unique_ptr<DeviceMemory>> targets;
  for (std::size_t i = 0; i < passes; ++i) {
    all.push_back(subject.make(elements));
    sources.push_back(std::make_unique<DeviceMemory>(copied));
    targets.push_back(std::make_unique<DeviceMemory>(copied));
  }
  if (all[0].kernel.entry == nullptr) throw std::runtime_error("no such kernel: " + subject.name);
  const unsigned blocks = whole_device(all[0].kernel);
  TimedGraph graph({[&](cudaStream_t stream) {
                      for (std::size_t i = 0; i < passes; ++i) {
                        check(cudaMemcpyAsync(targets[i]->data(), sources[i]->data(), copied,
                                              cudaMemcpyDeviceToDevice, stream),
                              "cudaMemcpyAsync");
                      }
                    },
                    [&](cudaStream_t stream) {
                      for (Pass& pass : all) {
                        void* parameters[] = {pass.args.data()};
                        check(cudaLaunchKernel(pass.kernel.entry, dim3(blocks),
                                               dim3(static_cast<unsigned>(pass.kernel.threads)), parameters,
                                               0, stream),
                              "cudaLaunchKernel");
                      }
                    }});
  std::vector<double> copy_times;
  std::vector<double> kernel_times;
  std::vector<double> shares;
  for (const std::vector<double>& times : graph.run(replays)) {
    copy_times.push_back(times[0]);
    kernel_times.push_back(times[1]);
    shares.push_back(times[0] / times[1]);
  }
  const double gigabytes = moved * static_cast<double>(passes) / 1e3;  // per microsecond, then per second
  return {gigabytes / median(kernel_times), gigabytes / median(copy_times), median(shares)};
}

}  // namespace

void measure_bandwidth(bool quick) {
  std::printf("ROW | kernel | bucket | kernel GB/s | copy GB/s | kernel / copy |\n");
  double worst = 0;
  std::string which;
  int missed = 0;
  int rows = 0;
  for (const Subject& subject : all_subjects()) {
    for (const auto& [size, elements] :
         {std::pair{"25 MiB", std::uint64_t{25} << 18}, std::pair{"1 GiB", std::uint64_t{1} << 28}}) {
      const Rates rates = measure(subject, elements, quick ? 3 : 15);
      std::printf("ROW | %s | %s | %.0f | %.0f | %.2f%s |\n", subject.name.c_str(), size, rates.kernel,
                  rates.copy, rates.share, rates.share < kGoal ? " (below 0.9)" : "");
      std::fflush(stdout);
      ++rows;
      if (rates.share < kGoal) ++missed;
      if (which.empty() || rates.share < worst) {
        worst = rates.share;
        which = subject.name + " at " + size;
      }
    }
  }
  std::printf("%d of %d reach 0.9 of a copy; the least: %.2f, %s\n", rows - missed, rows, worst,
              which.c_str());
}

}  // namespace fccl::gpu_check
