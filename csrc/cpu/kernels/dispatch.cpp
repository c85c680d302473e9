#include "cpu/kernels/dispatch.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/kernels/kernel_table.h"

#ifdef FCCL_X86_KERNELS
#include <cpuid.h>
#endif

namespace fccl::cpu {
namespace {

constexpr Isa kAllIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512};

// The sets that can be used, as bits 1 << Isa.
unsigned int find_available() {
  unsigned int sets = 1u << static_cast<int>(Isa::kPortable);
#ifdef FCCL_X86_KERNELS
  // __builtin_cpu_supports looks at XGETBV as well: whether the operating system saves the registers.
  __builtin_cpu_init();
  // Not every compiler knows "f16c" by name: leaf 1, ECX bit 29.
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & (1u << 29)) != 0;
  if (f16c && __builtin_cpu_supports("avx2")) {
    sets |= 1u << static_cast<int>(Isa::kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      sets |= 1u << static_cast<int>(Isa::kAvx512);
    }
  }
#endif
  return sets;
}

const KernelTable* table_of(Isa isa) {
#ifdef FCCL_X86_KERNELS
  if (isa == Isa::kAvx2) return &kAvx2Kernels;
  if (isa == Isa::kAvx512) return &kAvx512Kernels;
#endif
  return isa == Isa::kPortable ? &kPortableKernels : nullptr;
}

ReduceFunction look_up(const KernelTable& table, DType dtype, ReduceOp op) {
  const auto row = static_cast<std::uint8_t>(dtype);
  const auto column = static_cast<std::uint8_t>(op);
  return row < kDTypeCount && column < kReduceOpCount ? table.entry[row][column] : nullptr;
}

}  // namespace

const char* name_of(Isa isa) noexcept {
  switch (isa) {
    case Isa::kPortable: return "portable";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
  }
  return "unknown";
}

bool isa_available(Isa isa) noexcept {
  // Kept: virtual machines trap CPUID, which takes tens of microseconds.
  static const unsigned int available = find_available();
  return isa <= Isa::kAvx512 && (available & (1u << static_cast<int>(isa))) != 0;
}

IsaChoice choose_isa(const char* requested, Isa best) {
  if (requested == nullptr || *requested == '\0') return {best, ""};
  for (const Isa isa : kAllIsas) {
    if (std::strcmp(requested, name_of(isa)) != 0) continue;
    if (isa <= best) return {isa, ""};
    return {best, std::string("fccl: FCCL_ISA=") + requested +
                      " is not available in this build or on this CPU; using " + name_of(best)};
  }
  return {best, std::string("fccl: FCCL_ISA=") + requested + " is not one of portable, avx2, avx512; using " +
                    name_of(best)};
}

Isa selected_isa() noexcept {
  static const Isa isa = [] {
    Isa best = Isa::kPortable;
    for (const Isa candidate : kAllIsas) {
      if (isa_available(candidate)) best = candidate;
    }
    const IsaChoice choice = choose_isa(std::getenv("FCCL_ISA"), best);
    if (!choice.warning.empty()) std::fprintf(stderr, "%s\n", choice.warning.c_str());
    return choice.isa;
  }();
  return isa;
}

ReduceFunction find_reduce(DType dtype, ReduceOp op) noexcept {
  static const KernelTable& table = *table_of(selected_isa());
  return look_up(table, dtype, op);
}

ReduceFunction find_reduce(Isa isa, DType dtype, ReduceOp op) noexcept {
  return isa_available(isa) ? look_up(*table_of(isa), dtype, op) : nullptr;
}

const BlockKernels& block_kernels(codec::BlockFormat format) noexcept {
  static const KernelTable& table = *table_of(selected_isa());
  return table.blocks[static_cast<std::uint8_t>(format)];
}

const BlockKernels* block_kernels(Isa isa, codec::BlockFormat format) noexcept {
  return isa_available(isa) ? &table_of(isa)->blocks[static_cast<std::uint8_t>(format)] : nullptr;
}

}  // namespace fccl::cpu
