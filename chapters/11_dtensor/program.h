#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::dtensor {

/// This chapter's program: ch11_dtensor OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::dtensor
