#pragma once

#include "chapters/table/table.h"

namespace shardbook::table {

inline const Marks kUtf8 = marks_of(/*is_utf8=*/true);
inline const Marks kAscii = marks_of(/*is_utf8=*/false);

}  // namespace shardbook::table
