// What the host says of block formats.
#pragma once

#include "codec/block.h"

namespace fccl::codec {

constexpr const char* name_of(BlockFormat format) {
  switch (format) {
    case BlockFormat::kBFloat16: return "bfloat16";
    case BlockFormat::kFloat16: return "float16";
    case BlockFormat::kInt8: return "int8";
    case BlockFormat::kFloat8E4M3: return "fp8_e4m3";
    case BlockFormat::kFloat8E5M2: return "fp8_e5m2";
  }
  return "unknown";
}

struct CodeSize {
  int bytes;    // of an element
  bool scaled;  // whether blocks have a scale
};

constexpr CodeSize size_of_code(BlockFormat format) {
  switch (format) {
    case BlockFormat::kBFloat16: return {2, false};
    case BlockFormat::kFloat16: return {2, true};
    case BlockFormat::kInt8:
    case BlockFormat::kFloat8E4M3:
    case BlockFormat::kFloat8E5M2: break;
  }
  return {1, true};
}

}  // namespace fccl::codec
