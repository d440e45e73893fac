#pragma once

// Parameters that lie in parts on the ranks of one group.
//
//   ParameterLayout layout = [=](const std::string& name, int rank) {
//     return tensor_parallel::layout(config, name, rank, t);
//   };
//   std::vector<NamedTensor> whole = gather_parts(
//       model.named_parameters(), layout, tp, config.vocab_size);

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/run/training_state.h"
#include "comm/process_group.h"
#include "core/module.h"
#include "core/shards.h"

namespace shardbook {

/// The part of a parameter that a rank of the group holds, by the parameter's
/// name on one device. Ranks with equal parts hold replicas, bit for bit.
using ParameterLayout =
    std::function<Shards(const std::string& name, int rank)>;

/// No lower rank of the group holds the same part.
bool is_first_holder(const ParameterLayout& layout, const std::string& name,
                     int rank);

/// Which part of a file's tensors rank `rank` holds; tables of tokens
/// have `padded_vocabulary` rows in the model (0: as many as in the file).
PartOf part_of(const ParameterLayout& layout, int rank,
               std::int64_t padded_vocabulary);

/// Of the columns of a parameter that ranks share (Columns), those that count here:
/// on the lowest rank that holds them. The whole tensor where there are none.
Tensors first_held(const Tensor& values, const Shards& shards);

/// Collects the parts on the group's rank 0, a parameter at a time, without the
/// rows behind the vocabulary; empty on other ranks. Collective.
std::vector<NamedTensor> gather_parts(const std::vector<NamedTensor>& parts,
                                      const ParameterLayout& layout,
                                      ProcessGroup& group,
                                      std::int64_t vocabulary);

/// Sets how parts of a training's state, which know their own shapes only, are
/// cut out of the parameters on one device.
void place_parts(TrainingState& state, const ParameterLayout& layout, int rank,
                 std::int64_t vocabulary);

/// The smallest multiple of `parts` that is at least the vocabulary.
std::int64_t padded_vocabulary(std::int64_t vocabulary, std::int64_t parts);
/// Throws Error unless `parts` divide n: "--batch 6: the batch is cut into 4
/// parts; give 8".
void check_divides(const std::string& what, std::int64_t n, std::int64_t parts,
                   const std::string& why);

/// Sums each of these tensors, of one dtype, over the group, in one coalesced
/// all-reduce. Each rank's values count `factor` times.
void sum_over_ranks(ProcessGroup& group, const Tensors& values,
                    const std::string& label, double factor = 1);
/// The sums of these numbers, in f64. Collective.
std::vector<double> sum_over_ranks(ProcessGroup& group,
                                   const std::vector<double>& numbers,
                                   const std::string& label);
double sum_over_ranks(ProcessGroup& group, double number,
                      const std::string& label);
/// Sums the gradients of these parameters in the same way. A parameter without
/// a gradient counts as zeros.
void sum_gradients(ProcessGroup& group, const Tensors& parameters,
                   const std::string& label, double factor = 1);

}  // namespace shardbook
