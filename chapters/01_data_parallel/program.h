#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::data_parallel {

/// This chapter's program: ch01_data_parallel OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::data_parallel
