#pragma once

#include "chapters/06_1f1b/replay.h"

namespace shardbook::pipeline {

/// Forward and backward take one unit of time each.
inline const Costs kUnit{.forward = 1, .backward = 1};

}  // namespace shardbook::pipeline
