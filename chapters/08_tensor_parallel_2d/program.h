#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::summa {

/// This chapter's program: ch08_tensor_parallel_2d OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::summa
