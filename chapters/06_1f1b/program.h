#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::pipeline {

/// This chapter's program: ch06_1f1b OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::pipeline
