#pragma once

// Where a model is cut into stages: first layer of each stage, and the end.

#include <functional>
#include <string>
#include <vector>

#include "chapters/common/pipeline/stages.h"
#include "chapters/common/run/options.h"

namespace shardbook {

/// Stages of equally many layers; the first ones get one more if the layers do
/// not divide evenly (DeepSpeed's "uniform"). Throws Error for fewer layers
/// than stages.
std::vector<int> cut_uniform(int num_layers, int num_stages);
/// `balance` has the number of layers of each stage, as in torchgpipe. Throws
/// Error if they do not add up to `num_layers`.
std::vector<int> cut_by_balance(int num_layers,
                                const std::vector<int>& balance);
/// Minimises the cost of the most expensive stage; no stage is empty. O(p n^2).
std::vector<int> cut_by_cost(const std::vector<double>& costs, int num_stages);
/// The number of parameters of each layer; a tied one counts in each.
std::vector<double> layer_parameters(const LayerList& layers);
/// Seconds of forward and backward of each layer, on shapes: the sum of
/// `seconds_of` its operations. `inputs` are the model's.
std::vector<double> layer_seconds(
    const LayerList& layers, const Tensors& inputs, DType dtype,
    const std::function<double(const OpEvent&)>& seconds_of);

// --- Options of pipelines ----------------------------------------------------

/// For --help.
extern const char* const kPartitionHelp;

/// "42 layers: embedding, 40 blocks and head", of options.model.
std::string layers_text(const Options& options, int num_layers);

/// First layer of each of `num_stages` stages, and the end. "uniform": equally
/// many layers; "parameters": equally many parameters; "time": equal times of
/// forward and backward of `inputs()` on --cluster; "type:REGEX": equally many
/// layers whose type matches; "2,1,3": the layers of each stage. Throws Error
/// for fewer layers than stages, and for numbers that do not add up.
/// DeepSpeed's partition_method, torchgpipe's balance.
std::vector<int> cuts_of(const Options& options, const std::string& partition,
                         const LayerList& layers, int num_stages,
                         const std::function<Tensors()>& inputs);

/// --recompute (as recompute_from_name reads it) and --early-recompute.
void add_recompute(CommandLine& line, std::string& mode, bool& is_early);

}  // namespace shardbook
