// Text in fixed fields that other processes read: cut between characters, and made printable by the
// reader, since it ends up in an exception's text, which Python takes as UTF-8 only.
#pragma once

#include <cstddef>
#include <string>

namespace fccl {

// Fills `out` with as many whole characters of `text` as fit before a NUL; the rest is zeroed.
void copy_text(const std::string& text, char* out, std::size_t size) noexcept;
// Terminates `text` within `size` and replaces by '?' what is not well-formed UTF-8, and control characters.
void make_printable(char* text, std::size_t size) noexcept;

template <std::size_t N>
void copy_text(const std::string& text, char (&out)[N]) noexcept {
  copy_text(text, out, N);
}
template <std::size_t N>
void make_printable(char (&text)[N]) noexcept {
  make_printable(text, N);
}

}  // namespace fccl
