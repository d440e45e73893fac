#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::tensor_parallel {

/// This chapter's program: ch07_tensor_parallel OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::tensor_parallel
