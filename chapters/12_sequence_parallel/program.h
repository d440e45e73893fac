#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::sequence_parallel {

/// This chapter's program: ch12_sequence_parallel OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::sequence_parallel
