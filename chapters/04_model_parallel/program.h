#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::model_parallel {

/// This chapter's program: ch04_model_parallel OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::model_parallel
