#pragma once

// Jobs on meshes from the rows of tables, and the work that they do.

#include <string>

#include "bench/validate/kinds.h"
#include "bench/validate/table.h"
#include "chapters/planner/step.h"
#include "chapters/planner/work.h"

namespace shardbook::validate {

// The names of the shelf that rows are made into.
using planner::DecoderSizes;
using planner::HybridJob;
using planner::HybridStep;
using planner::model_flops;
using planner::Recompute;
using planner::recomputed_flops;
using planner::tokens_of;

/// Megatron-LM's default, of hidden units and of attention.
constexpr double kMegatronDropout = 0.1;

/// Layers, sizes and sequence.
HybridJob hybrid_job_of(const Row& row, int vocabulary);
/// The row's GPUs that are left make the data-parallel degree; throws Error
/// where they do not divide, or where the row's dp is another.
void set_degrees(const Row& row, int tp, int pp, int cp, HybridJob& job);
/// From global_batch.
void set_micro_batches(const Row& row, HybridJob& job);

int ranks_of(const HybridJob& job);

/// Megatron-LM of 2021: full recomputation, 16-bit gradients, no overlap.
HybridJob megatron_job(const Row& row);
/// A row of Narayanan et al. 2021, table 1; of Llama 3, table 4.
HybridJob sc21_table1_job(const Row& row);
HybridJob llama3_job(const Row& row);

/// Throws NotExpressed for machines other than Selene.
void expect_selene(const Row& row);
/// A row of Megatron-LM's of 2021, on Selene, with one chunk per rank.
Outcome megatron_2021(const Row& row, const std::string& model);

/// "22B, sequence 2048, tp 8, pp 1, dp 1, 1 x 4".
std::string describe(const std::string& model, const HybridJob& job);

}  // namespace shardbook::validate
