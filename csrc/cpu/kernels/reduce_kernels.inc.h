// The reduction kernels, in terms of GCC vectors of FCCL_VECTOR_BYTES bytes. Each
// kernels_*.cpp includes this file once, after defining that macro, and is compiled for one
// instruction set.
//
// Everything here has internal linkage or is always inlined, and no standard header with inline
// functions is included: the linker would keep one of several equal inline functions for the whole
// program, perhaps the one with AVX-512 instructions. A test looks at the object files' symbols.
//
// One vector expression serves the body and the last few elements (padded with zeros), so an
// element's result cannot depend on where it lies.
#include <cstddef>
#include <cstdint>

#include "cpu/kernels/block_kernels.inc.h"
#include "cpu/kernels/formats.inc.h"
#include "cpu/kernels/kernel_table.h"

namespace fccl::cpu {
namespace {

// ---- Operations -------------------------------------------------------------------------------

struct Sum {
  template <class V>
  static FCCL_ALWAYS_INLINE V combine(V a, V b) {
    return a + b;
  }
};
struct Product {
  template <class V>
  static FCCL_ALWAYS_INLINE V combine(V a, V b) {
    return a * b;
  }
};
// Min and max keep the first of equal values (so of -0 and +0) and a NaN from either side.
struct Min {
  template <class V>
  static FCCL_ALWAYS_INLINE V combine(V a, V b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct Max {
  template <class V>
  static FCCL_ALWAYS_INLINE V combine(V a, V b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};
struct And {
  template <class V>
  static FCCL_ALWAYS_INLINE V combine(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <class V>
  static FCCL_ALWAYS_INLINE V combine(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <class V>
  static FCCL_ALWAYS_INLINE V combine(V a, V b) {
    return a ^ b;
  }
};

// ---- Finishing --------------------------------------------------------------------------------

// Which NaN an operation on two NaNs gives depends on the instruction set and on the compiler's
// choice of operand order, and inf - inf has another sign on x86 than on AArch64. Results have one.
template <class V>
FCCL_ALWAYS_INLINE V canonical_nan(V value) {
  if constexpr (sizeof(value[0]) == 4) {
    using Bits = Vector<std::uint32_t, sizeof(V) / 4>;
    return value == value ? value : __builtin_bit_cast(V, Bits{} + 0x7fc00000u);
  } else {
    using Bits = Vector<std::uint64_t, sizeof(V) / 8>;
    return value == value ? value : __builtin_bit_cast(V, Bits{} + 0x7ff8000000000000u);
  }
}

// T: the type of one lane.
struct Keep {
  template <class T, class V>
  static FCCL_ALWAYS_INLINE V finish(V value, int) {
    return value;
  }
};
struct CanonicalNaN {
  template <class T, class V>
  static FCCL_ALWAYS_INLINE V finish(V value, int) {
    return canonical_nan(value);
  }
};
struct Divide {
  template <class T, class V>
  static FCCL_ALWAYS_INLINE V finish(V value, int divisor) {
    return canonical_nan(value / static_cast<T>(divisor));
  }
};
// As Divide, for powers of two: their reciprocals are exact, so the product is the same number,
// correctly rounded, as the quotient, and much cheaper.
struct Scale {
  template <class T, class V>
  static FCCL_ALWAYS_INLINE V finish(V value, int divisor) {
    return canonical_nan(value * (T{1} / static_cast<T>(divisor)));
  }
};

// ---- The loop ---------------------------------------------------------------------------------

template <class Format, class Op, class Finish>
struct Reduction {
  using Stored = typename Format::Stored;
  using Lanes = typename Format::Lanes;
  using Lane = __typeof__(Lanes{}[0] + Lanes{}[0]);
  static constexpr int kParts = Format::kParts;
  using Accumulator = Parts<Lanes, kParts>;
  static constexpr std::size_t kStep = sizeof(Stored);
  // Vectors per turn of the loop; their accumulators stay in registers while all sources are read.
  static constexpr int kTile = kParts >= 4 ? 1 : 4 / kParts;

  static FCCL_ALWAYS_INLINE void begin(Accumulator& accumulator, Stored value) {
#pragma GCC unroll 8
    for (int k = 0; k < kParts; ++k) accumulator.part[k] = Format::widen(value, k);
  }
  static FCCL_ALWAYS_INLINE void add(Accumulator& accumulator, Stored value) {
#pragma GCC unroll 8
    for (int k = 0; k < kParts; ++k) {
      accumulator.part[k] = Op::template combine<Lanes>(accumulator.part[k], Format::widen(value, k));
    }
  }
  static FCCL_ALWAYS_INLINE Stored end(Accumulator& accumulator, int divisor) {
#pragma GCC unroll 8
    for (int k = 0; k < kParts; ++k) {
      accumulator.part[k] = Finish::template finish<Lane, Lanes>(accumulator.part[k], divisor);
    }
    return Format::narrow(accumulator);
  }

  // kVectors vectors at `offset`. All sources are read before anything is written: `out` and `copy`
  // may be sources.
  template <int kVectors>
  static FCCL_ALWAYS_INLINE void block(char* out, char* copy, const void* const* sources, int source_count,
                                       std::size_t offset, int divisor) {
    Accumulator accumulator[kVectors];
    const char* first = static_cast<const char*>(sources[0]) + offset;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) begin(accumulator[v], load<Stored>(first + v * kStep));
    for (int s = 1; s < source_count; ++s) {
      const char* source = static_cast<const char*>(sources[s]) + offset;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) add(accumulator[v], load<Stored>(source + v * kStep));
    }
    Stored result[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      result[v] = end(accumulator[v], divisor);
      store(out + offset + v * kStep, result[v]);
    }
    if (copy != nullptr) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(copy + offset + v * kStep, result[v]);
    }
  }

  // The last `bytes` < kStep.
  static FCCL_ALWAYS_INLINE void tail(char* out, char* copy, const void* const* sources, int source_count,
                                      std::size_t offset, std::size_t bytes, int divisor) {
    Accumulator accumulator;
    begin(accumulator, load_tail<Stored>(static_cast<const char*>(sources[0]) + offset, bytes));
    for (int s = 1; s < source_count; ++s) {
      add(accumulator, load_tail<Stored>(static_cast<const char*>(sources[s]) + offset, bytes));
    }
    const Stored result = end(accumulator, divisor);
    store_tail(out + offset, result, bytes);
    if (copy != nullptr) store_tail(copy + offset, result, bytes);
  }

  static FCCL_ALWAYS_INLINE std::size_t body(char* out, char* copy, const void* const* sources,
                                             int source_count, std::size_t bytes, int divisor) {
    std::size_t offset = 0;
    for (; bytes - offset >= kTile * kStep; offset += kTile * kStep) {
      block<kTile>(out, copy, sources, source_count, offset, divisor);
    }
    return offset;
  }

  static void run(void* out, void* copy, const void* const* sources, int source_count, std::size_t count,
                  int divisor) {
    const std::size_t bytes = count * sizeof(typename Format::Element);
    char* const to = static_cast<char*>(out);
    char* const also_to = static_cast<char*>(copy);
    std::size_t offset = 0;
    if (source_count == 2) {  // the usual case: pointers in registers, no inner loop
      const void* const two[2] = {sources[0], sources[1]};
      offset = body(to, also_to, two, 2, bytes, divisor);
    } else {
      offset = body(to, also_to, sources, source_count, bytes, divisor);
    }
    for (; bytes - offset >= kStep; offset += kStep) {
      block<1>(to, also_to, sources, source_count, offset, divisor);
    }
    if (offset != bytes) tail(to, also_to, sources, source_count, offset, bytes - offset, divisor);
  }
};

template <class Format>
void average_floats(void* out, void* copy, const void* const* sources, int source_count, std::size_t count,
                    int divisor) {
  const ReduceFunction run =
      is_power_of_two(divisor) ? &Reduction<Format, Sum, Scale>::run : &Reduction<Format, Sum, Divide>::run;
  run(out, copy, sources, source_count, count, divisor);
}

__extension__ using Int128 = __int128;

// One element at a time: integer vectors cannot be divided. Wraps to T what does not fit.
template <class T, class Wide>
void average_wide(void* out, void* copy, const void* const* sources, int source_count, std::size_t count,
                  int divisor) {
  const bool shifts = is_power_of_two(divisor);
  const int shift = shifts ? __builtin_ctz(static_cast<unsigned>(divisor)) : 0;
  for (std::size_t i = 0; i < count; ++i) {
    Wide sum = 0;
    for (int s = 0; s < source_count; ++s) {
      T value;
      __builtin_memcpy(&value, static_cast<const char*>(sources[s]) + i * sizeof(T), sizeof(T));
      sum += value;
    }
    const std::int64_t low = static_cast<std::int64_t>(sum);
    T result;
    if (shifts) {  // a shift rounds down; adding divisor - 1 to negative sums makes it truncate
      result = static_cast<T>((sum + ((sum >> (8 * sizeof(Wide) - 1)) & (divisor - 1))) >> shift);
    } else if (low == sum) {  // a 128-bit division is a slow call; sums rarely need it
      result = static_cast<T>(low / divisor);
    } else {
      result = static_cast<T>(sum / divisor);
    }
    __builtin_memcpy(static_cast<char*>(out) + i * sizeof(T), &result, sizeof(T));
    if (copy != nullptr) __builtin_memcpy(static_cast<char*>(copy) + i * sizeof(T), &result, sizeof(T));
  }
}

// Exact in floats: with |sum| + divisor < 2^p (p bits of significand) a quotient that is not whole
// lies further from the next whole number than rounding can carry it, so truncation is right. A
// divisor below the number of sources could leave T's range; that case goes the wide way.
template <class Format, int kMaxSources>
void average_integers(void* out, void* copy, const void* const* sources, int source_count, std::size_t count,
                      int divisor) {
  ReduceFunction run = &average_wide<typename Format::Element, std::int64_t>;
  if (source_count <= kMaxSources && divisor >= source_count && divisor <= 32768) {
    run =
        is_power_of_two(divisor) ? &Reduction<Format, Sum, Scale>::run : &Reduction<Format, Sum, Divide>::run;
  }
  run(out, copy, sources, source_count, count, divisor);
}

// ---- The table --------------------------------------------------------------------------------

struct TableMaker {
  KernelTable table{};

  constexpr void set(DType dtype, ReduceOp op, ReduceFunction function) {
    table.entry[static_cast<int>(dtype)][static_cast<int>(op)] = function;
  }
  template <class Format>
  constexpr void set_floats(DType dtype) {
    set(dtype, ReduceOp::kSum, &Reduction<Format, Sum, CanonicalNaN>::run);
    set(dtype, ReduceOp::kAvg, &average_floats<Format>);
    set(dtype, ReduceOp::kProduct, &Reduction<Format, Product, CanonicalNaN>::run);
    set(dtype, ReduceOp::kMin, &Reduction<Format, Min, CanonicalNaN>::run);
    set(dtype, ReduceOp::kMax, &Reduction<Format, Max, CanonicalNaN>::run);
  }
  // U: the unsigned type of T's width, in which sums and products wrap by definition.
  template <class T, class U>
  constexpr void set_integers(DType dtype, ReduceFunction average) {
    set(dtype, ReduceOp::kSum, &Reduction<Plain<U>, Sum, Keep>::run);
    set(dtype, ReduceOp::kAvg, average);
    set(dtype, ReduceOp::kProduct, &Reduction<Plain<U>, Product, Keep>::run);
    set(dtype, ReduceOp::kMin, &Reduction<Plain<T>, Min, Keep>::run);
    set(dtype, ReduceOp::kMax, &Reduction<Plain<T>, Max, Keep>::run);
    set(dtype, ReduceOp::kBand, &Reduction<Plain<U>, And, Keep>::run);
    set(dtype, ReduceOp::kBor, &Reduction<Plain<U>, Or, Keep>::run);
    set(dtype, ReduceOp::kBxor, &Reduction<Plain<U>, Xor, Keep>::run);
  }
  template <class Code>
  constexpr void set_blocks() {
    table.blocks[static_cast<int>(Code::kFormat)] = {&encode_blocks<Code>, &average_blocks<Code>,
                                                     &decode_blocks<Code>};
  }
  constexpr void set_bool() {
    const ReduceFunction conjunction = &Reduction<BoolFormat, And, Keep>::run;
    const ReduceFunction disjunction = &Reduction<BoolFormat, Or, Keep>::run;
    set(DType::kBool, ReduceOp::kSum, disjunction);
    set(DType::kBool, ReduceOp::kProduct, conjunction);
    set(DType::kBool, ReduceOp::kMin, conjunction);
    set(DType::kBool, ReduceOp::kMax, disjunction);
    set(DType::kBool, ReduceOp::kBand, conjunction);
    set(DType::kBool, ReduceOp::kBor, disjunction);
    set(DType::kBool, ReduceOp::kBxor, &Reduction<BoolFormat, Xor, Keep>::run);
  }
};

constexpr KernelTable make_table() {
  TableMaker maker;
  maker.set_floats<Plain<float>>(DType::kFloat32);
  maker.set_floats<Plain<double>>(DType::kFloat64);
  maker.set_floats<HalfFormat>(DType::kFloat16);
  maker.set_floats<BFloat16Format>(DType::kBFloat16);
  maker.set_integers<std::int8_t, std::uint8_t>(DType::kInt8,
                                                &average_integers<IntegerAsFloat<std::int8_t>, 16384>);
  maker.set_integers<std::uint8_t, std::uint8_t>(DType::kUInt8,
                                                 &average_integers<IntegerAsFloat<std::uint8_t>, 16384>);
  maker.set_integers<std::int16_t, std::uint16_t>(DType::kInt16,
                                                  &average_integers<IntegerAsFloat<std::int16_t>, 256>);
  maker.set_integers<std::int32_t, std::uint32_t>(DType::kInt32, &average_integers<Int32AsDouble, 32768>);
  maker.set_integers<std::int64_t, std::uint64_t>(DType::kInt64, &average_wide<std::int64_t, Int128>);
  maker.set_bool();
  maker.set_blocks<codec::BFloat16Code>();
  maker.set_blocks<codec::Float16Code>();
  maker.set_blocks<codec::Int8Code>();
  maker.set_blocks<codec::Float8E4M3Code>();
  maker.set_blocks<codec::Float8E5M2Code>();
  return maker.table;
}

}  // namespace
}  // namespace fccl::cpu
