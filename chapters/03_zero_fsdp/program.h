#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::zero_fsdp {

/// This chapter's program: ch03_zero_fsdp OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::zero_fsdp
