#pragma once

// --partition: where a model is cut into stages.

#include <functional>
#include <string>
#include <vector>

#include "chapters/common/pipeline/stages.h"
#include "chapters/common/run/options.h"

namespace shardbook {

/// For --help.
extern const char* const kPartitionHelp;

/// First layer of each of `num_stages` stages, and the end. "uniform": equally
/// many layers; "parameters": equally many parameters; "time": equal times of
/// forward and backward of `inputs()` on --cluster; "type:REGEX": equally many
/// layers whose type matches; "2,1,3": the layers of each stage. Throws Error
/// for fewer layers than stages, and for numbers that do not add up.
/// DeepSpeed's partition_method, torchgpipe's balance.
std::vector<int> cuts_of(const Options& options, const std::string& partition,
                         const LayerList& layers, int num_stages,
                         const std::function<Tensors()>& inputs);

}  // namespace shardbook
