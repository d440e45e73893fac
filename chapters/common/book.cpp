// The pages of the book, built into the library.

#include <cstddef>

#include "chapters/common/data.h"

asm(".section .rodata\n"
    ".global shardbook_book_begin, shardbook_book_end\n"
    "shardbook_book_begin:\n"
    ".incbin \"" SHARDBOOK_BOOK_FILE "\"\n"
    "shardbook_book_end:\n"
    ".byte 0\n"
    ".previous\n");

extern "C" {
extern const char shardbook_book_begin[];
extern const char shardbook_book_end[];
}

namespace shardbook {

std::string book_text() {
  return std::string(
      shardbook_book_begin,
      static_cast<std::size_t>(shardbook_book_end - shardbook_book_begin));
}

}  // namespace shardbook
