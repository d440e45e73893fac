// A build without the book's text, for runs on shapes alone.

#include "chapters/common/models/data.h"
#include "core/check.h"

namespace shardbook {

std::string book_text() { SB_FAIL("--data book: this build has no pages"); }

}  // namespace shardbook
