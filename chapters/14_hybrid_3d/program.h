#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::hybrid {

/// This chapter's program: ch14_hybrid_3d OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::hybrid
