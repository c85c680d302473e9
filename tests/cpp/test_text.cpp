#include "common/text.h"

#include <gtest/gtest.h>

#include <string>

namespace fccl {
namespace {

std::string printable(std::string text) {
  make_printable(text.data(), text.size() + 1);
  return text;
}

TEST(Text, WhatIsPrintableStays) {
  for (const char* text : {"", "plain text", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "a\xc3\xa9z"})
    EXPECT_EQ(printable(text), text);
}

TEST(Text, WhatIsNotBecomesQuestionMarks) {
  EXPECT_EQ(printable("a\nb\tc\x7f"), "a?b?c?");
  EXPECT_EQ(printable("\xff\xfe"), "??");
  EXPECT_EQ(printable("\x80 alone"), "? alone");
  EXPECT_EQ(printable("\xc0\xaf overlong"), "?? overlong");
  EXPECT_EQ(printable("\xe0\x80\x80"), "???");
  EXPECT_EQ(printable("\xed\xa0\x80"), "???");       // a surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "????");  // beyond U+10FFFF
  EXPECT_EQ(printable("cut \xe2\x82"), "cut ??");    // the field ends inside a character
}

TEST(Text, AFieldWithoutAnEndGetsOne) {
  char field[4] = {'a', 'b', 'c', 'd'};
  make_printable(field);
  EXPECT_STREQ(field, "abc");
}

TEST(Text, CopiesAreCutBetweenCharacters) {
  char field[6];
  copy_text("abcd\xc3\xa9", field);
  EXPECT_STREQ(field, "abcd");
  copy_text("abc\xc3\xa9", field);
  EXPECT_STREQ(field, "abc\xc3\xa9");
  copy_text("x", field);
  EXPECT_EQ(std::string(field, 6), std::string("x\0\0\0\0\0", 6));
}

}  // namespace
}  // namespace fccl
