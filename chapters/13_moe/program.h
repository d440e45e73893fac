#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::moe {

/// This chapter's program: ch13_moe OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::moe
