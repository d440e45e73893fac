#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::ddp {

/// This chapter's program: ch02_ddp OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::ddp
