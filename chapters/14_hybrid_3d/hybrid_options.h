#pragma once

// The chapter's own options.

#include "chapters/14_hybrid_3d/degrees.h"

namespace shardbook::hybrid {

void add_options(CommandLine& line, HybridOptions& setup);

}  // namespace shardbook::hybrid
