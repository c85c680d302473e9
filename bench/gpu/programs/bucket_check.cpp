// Buckets with parameters of many lengths, gaps between them, and numbers of all kinds go the whole way
// (encode, reduce, decode) on the machine and through the CPU's coder. Wires, shards, remainders and
// gradients must come out alike to the bit; of a NaN that was multiplied only that it is one, since its sign
// and payload are the processor's choice.
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "checks.h"
#include "cpu/bucket_coder.h"
#include "cuda/bucket_kernels.h"
#include "numbers.h"

namespace fccl::gpu_check {
namespace {

using codec::BlockFormat;
using codec::BucketLayout;
using cuda::BucketKernel;
using cuda::Range;
using cuda::RangeTable;

struct Parameter {
  std::size_t begin = 0;
  std::size_t length = 0;
  bool exempt = false;
};

// What all ranks of a case have in common.
struct Shape {
  std::vector<Parameter> parameters;
  std::size_t elements = 0;  // of the memory that they lie in, gaps included

  // `gap`: elements that belong to no parameter, before, between and behind them.
  void add(std::size_t length, bool exempt, std::size_t gap) {
    parameters.push_back({elements + gap, length, exempt});
    elements += gap + length;
  }
};

enum class Exempt { kSome, kNone, kAll };

Shape small_shape(Exempt exempt, std::size_t shift) {
  Shape shape;
  // Around the sizes of blocks, and begins of every alignment.
  const std::size_t lengths[] = {1, 3, 700, 128, 64, 1024, 5, 2049, 257, 12, 255};
  for (std::size_t i = 0; i < std::size(lengths); ++i) {
    const bool travels_as_it_is = exempt == Exempt::kAll || (exempt == Exempt::kSome && i % 4 == 1);
    shape.add(lengths[i], travels_as_it_is, (i + shift) % 5 == 0 ? 1 + shift % 3 : 0);
  }
  shape.elements += 7;
  return shape;
}

Shape large_shape(Numbers& numbers) {
  Shape shape;
  for (int i = 0; i < 40; ++i) {
    const bool is_bias = i % 3 == 2;
    shape.add(1 + numbers.below(is_bias ? 5000 : 20'000), is_bias, numbers.below(4));
  }
  return shape;
}

struct Case {
  Shape shape;
  BlockFormat format = BlockFormat::kInt8;
  std::uint32_t block = 256;
  int world = 2;
  bool feedback = false;
  Grid grid;
  std::uint64_t seed = 0;
};

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// One rank's bucket: on the host as the CPU's coder has it, and on the machine.
template <class Source>
class Bucket {
 public:
  using Stored = typename Source::Stored;

  Bucket(Machine& machine, const Case& c, int rank) : machine_(machine), case_(c) {
    Numbers numbers(c.seed * 100 + static_cast<std::uint64_t>(rank));
    for (std::size_t i = 0; i < c.shape.elements; ++i) {
      float value = numbers.next() * std::ldexp(1.0f, static_cast<int>(i / 500 % 5) * 20 - 40);
      // Blocks without a special number; blocks of nothing but zeros on this rank, or on all.
      if (i / 300 % 3 == 0) value = numbers.plain();
      if ((i / 1200 + index(rank)) % 3 == 0 && i / 150 % 2 == 1) value = 0;
      if (i >= 900 && i < 1300) value = 0;
      gradients.push_back(Source::narrow(value));
      remainders.push_back(numbers.plain() * 0.01f);
    }
    device_gradients = machine.put(gradients);
    device_remainders = machine.put(remainders);
    std::vector<Range> coded;
    std::vector<Range> exempt;
    std::uint64_t blocks = 0;
    std::uint64_t exempt_elements = 0;
    for (const Parameter& one : c.shape.parameters) {
      auto* const data = reinterpret_cast<std::byte*>(device_gradients + one.begin);
      if (one.exempt) {
        exempt.push_back({data, nullptr, one.length, exempt_elements});
        exempt_elements += one.length;
      } else {
        coded.push_back({data, c.feedback ? device_remainders + one.begin : nullptr, one.length, blocks});
        blocks += BucketLayout::blocks_of(one.length, c.block);
      }
    }
    coded_table = {machine.put(coded), static_cast<std::uint32_t>(coded.size())};
    exempt_table = {machine.put(exempt), static_cast<std::uint32_t>(exempt.size())};
  }

  cpu::BucketCoder coder() {
    std::vector<cpu::BucketRange> ranges;
    for (const Parameter& one : case_.shape.parameters) {
      float* const remainder = case_.feedback && !one.exempt ? remainders.data() + one.begin : nullptr;
      ranges.push_back({one.begin, one.length, one.exempt, remainder});
    }
    return {case_.format, case_.block, case_.world, std::move(ranges)};
  }
  std::vector<float> widened() const {
    std::vector<float> values;
    for (const Stored gradient : gradients) values.push_back(Source::widen(gradient));
    return values;
  }

  // Empty if the machine's memory is what the CPU has.
  std::string compare_remainders() {
    const std::vector<float> theirs = machine_.get(device_remainders, remainders.size());
    return same_bits(theirs, remainders) ? "" : "a remainder differs";
  }
  std::string compare_gradients() {
    const std::vector<Stored> theirs = machine_.get(device_gradients, gradients.size());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const bool both_nan = std::isnan(Source::widen(theirs[i])) && std::isnan(Source::widen(gradients[i]));
      if (!both_nan && std::memcmp(&theirs[i], &gradients[i], sizeof(Stored)) != 0)
        return "element " + std::to_string(i) + " of the bucket differs";
    }
    return "";
  }

  std::vector<Stored> gradients;
  std::vector<float> remainders;
  Stored* device_gradients = nullptr;
  float* device_remainders = nullptr;
  RangeTable coded_table{};
  RangeTable exempt_table{};

 private:
  Machine& machine_;
  const Case& case_;
};

template <class Source>
class BucketRun {
 public:
  BucketRun(Machine& machine, const Case& c) : machine_(machine), case_(c) {
    for (int rank = 0; rank < c.world; ++rank) buckets_.emplace_back(machine, c, rank);
    for (auto& bucket : buckets_) coders_.push_back(bucket.coder());
    layout_ = coders_[0].layout();
  }

  // Empty if all came out right.
  std::string run() {
    std::string complaint = encode();
    if (complaint.empty()) complaint = reduce();
    if (complaint.empty()) complaint = decode();
    return complaint;
  }

 private:
  using Bytes = std::vector<std::byte>;

  // Every byte of a message must be written, those that hold nothing too.
  std::byte* poisoned(std::uint64_t bytes) { return machine_.put(Bytes(bytes, std::byte{0x77})); }

  KernelEntry kernel(BucketKernel which) const {
    return cuda::find_kernel(which, Source::kDType, case_.format, case_.block);
  }

  std::string encode() {
    for (std::size_t rank = 0; rank < buckets_.size(); ++rank) {
      auto& bucket = buckets_[rank];
      Bytes expected(coders_[rank].wire_bytes());
      coders_[rank].encode(bucket.widened().data(), expected.data());
      std::byte* const wire = poisoned(expected.size());
      machine_.launch(0, kernel(BucketKernel::kEncode), case_.grid,
                      cuda::EncodeBucketArgs{layout_, bucket.coded_table, bucket.exempt_table, wire});
      machine_.finish();
      const std::string of_rank = "encode on rank " + std::to_string(rank) + ": ";
      if (!same_bits(machine_.get(wire, expected.size()), expected)) return of_rank + "a message differs";
      if (std::string why = bucket.compare_remainders(); !why.empty()) return of_rank + why;
      if (std::string why = bucket.compare_gradients(); !why.empty()) return of_rank + why;
      wires_.push_back(std::move(expected));
    }
    return "";
  }

  std::string reduce() {
    const float* const divisor = machine_.put(std::vector<float>{static_cast<float>(case_.world)});
    for (std::uint32_t rank = 0; rank < layout_.world; ++rank) {
      Bytes received;
      for (const Bytes& wire : wires_) {
        const auto shard = wire.begin() + static_cast<std::ptrdiff_t>(rank * layout_.shard_bytes());
        received.insert(received.end(), shard, shard + static_cast<std::ptrdiff_t>(layout_.shard_bytes()));
      }
      Bytes expected(layout_.shard_bytes());
      coders_[rank].average(static_cast<int>(rank), received.data(), case_.world, expected.data());
      std::byte* const out = poisoned(expected.size());
      machine_.launch(0, kernel(BucketKernel::kReduce), case_.grid,
                      cuda::ReduceShardArgs{layout_, buckets_[rank].coded_table, machine_.put(received), out,
                                            divisor, rank});
      machine_.finish();
      const std::string of_rank = "reduce on rank " + std::to_string(rank) + ": ";
      if (!same_bits(machine_.get(out, expected.size()), expected)) return of_rank + "the shard differs";
      if (std::string why = buckets_[rank].compare_remainders(); !why.empty()) return of_rank + why;
      gathered_.insert(gathered_.end(), expected.begin(), expected.end());
    }
    return "";
  }

  std::string decode() {
    auto& bucket = buckets_[0];
    std::vector<float> values = bucket.widened();
    coders_[0].decode(gathered_.data(), values.data());
    std::uint32_t any = 0;
    for (const Parameter& one : case_.shape.parameters) {
      for (std::size_t i = one.begin; i < one.begin + one.length; ++i) {
        bucket.gradients[i] = Source::narrow(values[i]);
        if (!std::isfinite(values[i])) any = 1;
      }
    }
    std::uint32_t* const flag = machine_.put(std::vector<std::uint32_t>{0});
    machine_.launch(0, kernel(BucketKernel::kDecode), case_.grid,
                    cuda::DecodeBucketArgs{layout_, bucket.coded_table, bucket.exempt_table,
                                           machine_.put(gathered_), flag});
    machine_.finish();
    if (std::string why = bucket.compare_gradients(); !why.empty()) return "decode: " + why;
    if (machine_.get(flag, 1)[0] != any) return "decode: the flag for inf and NaN is wrong";
    return "";
  }

  Machine& machine_;
  const Case& case_;
  std::vector<Bucket<Source>> buckets_;
  std::vector<cpu::BucketCoder> coders_;
  BucketLayout layout_;
  std::vector<Bytes> wires_;  // by rank
  Bytes gathered_;
};

template <class Source>
void run_case(Machine& machine, const Case& c, Report& report) {
  const std::string what = std::string(codec::name_of(c.format)) + " codes, blocks of " +
                           std::to_string(c.block) + ", " + fccl::name_of(Source::kDType) + " gradients, " +
                           std::to_string(c.world) + " ranks" + (c.feedback ? ", error feedback" : "");
  report.add(what, BucketRun<Source>(machine, c).run());
  machine.release_all();
}

// Every kernel of the tables, with and without error feedback.
template <class Source>
void check_source(Machine& machine, const Effort& effort, Report& report) {
  const int worlds[] = {2, 3, 8, 1, 4};
  std::uint64_t number = 0;
  for (const BlockFormat format : {BlockFormat::kInt8, BlockFormat::kFloat8E4M3, BlockFormat::kFloat8E5M2,
                                   BlockFormat::kFloat16, BlockFormat::kBFloat16}) {
    for (const std::uint32_t block : {128u, 256u, 512u, 1024u}) {
      const KernelEntry kernel = cuda::find_kernel(BucketKernel::kEncode, Source::kDType, format, block);
      if (kernel.entry == nullptr) continue;
      const auto all_threads = static_cast<unsigned>(kernel.threads);
      for (const bool feedback : {true, false}) {
        Case c{small_shape(Exempt::kSome, number),
               format,
               block,
               worlds[number % std::size(worlds)],
               feedback,
               {2, 96},
               effort.seed + number};
        ++number;
        if (machine.is_fast()) c.grid = {1 + static_cast<unsigned>(number % 7), all_threads};
        run_case<Source>(machine, c, report);
        if (!machine.is_fast() || effort.small) continue;
        Numbers numbers(c.seed);
        c.shape = large_shape(numbers);
        c.grid = {2 * machine.multiprocessors(), all_threads};
        run_case<Source>(machine, c, report);
      }
    }
  }
  for (const Exempt exempt : {Exempt::kNone, Exempt::kAll}) {
    const Case c{small_shape(exempt, 2), BlockFormat::kInt8, 256, 2, true, {1, 64}, effort.seed};
    run_case<Source>(machine, c, report);
  }
}

}  // namespace

void check_buckets(Machine& machine, const Effort& effort, Report& report) {
  check_source<cuda::FloatSource>(machine, effort, report);
  check_source<cuda::Float16Source>(machine, effort, report);
  check_source<cuda::BFloat16Source>(machine, effort, report);
}

}  // namespace fccl::gpu_check
