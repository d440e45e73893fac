#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::single_device {

/// This chapter's program: ch00_single_device OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::single_device
