#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::gpipe {

/// This chapter's program: ch05_gpipe OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::gpipe
