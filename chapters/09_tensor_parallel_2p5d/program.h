#pragma once

#include "chapters/common/run/program.h"

namespace shardbook::tesseract {

/// This chapter's program: ch09_tensor_parallel_2p5d OPTIONS.
Program program(CommandLine& line);

}  // namespace shardbook::tesseract
