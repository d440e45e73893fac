#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::engine {

/// This chapter's program: ch15_engine OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::engine
