#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::cube {

/// This chapter's program: ch10_tensor_parallel_3d OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::cube
