#pragma once

#include "chapters/common/pipeline/replay.h"

namespace shardbook::pipeline {

/// Forward and backward take one unit of time each.
inline const Costs kUnit{.forward = 1, .backward = 1};

}  // namespace shardbook::pipeline
