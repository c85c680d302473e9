#include "common/text.h"

#include <algorithm>
#include <cstring>

namespace fccl {

namespace {

// Bytes of the well-formed UTF-8 character at `text`, at most `left`; 0 if there is none, or only a
// control character.
std::size_t printable_length(const char* text, std::size_t left) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || length > left) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, and what lies beyond U+10FFFF.
  if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) > 0x9f)) return 0;
  if ((first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) > 0x8f)) return 0;
  return length;
}

}  // namespace

void copy_text(const std::string& text, char* out, std::size_t size) noexcept {
  std::size_t length = std::min(text.size(), size - 1);
  while (length != 0 && length != text.size() && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80)
    --length;
  std::memset(out, 0, size);
  std::memcpy(out, text.data(), length);
}

void make_printable(char* text, std::size_t size) noexcept {
  text[size - 1] = '\0';
  for (std::size_t i = 0; text[i] != '\0';) {
    const std::size_t length = printable_length(text + i, size - i);
    if (length == 0) text[i] = '?';
    i += length == 0 ? 1 : length;
  }
}

}  // namespace fccl
