#pragma once

// Training jobs from the rows of tables, and what is predicted for them.

#include <cstdint>
#include <string>

#include "bench/validate/jobs.h"
#include "bench/validate/kinds.h"

namespace shardbook::validate {

// More would be no model of this time, and would take long to simulate.
constexpr int kMaxLayers = 2000;
constexpr int kMaxSize = 1 << 20;
constexpr int kMaxMicroBatchesPerRank = 4096;
/// Megatron-LM's default dropout, for hidden units and attention.
constexpr double kMegatronDropout = 0.1;
/// Its vocabulary: GPT-2's, padded.
constexpr int kMegatronVocabulary = 51200;

/// Layers, sizes and sequence. `vocabulary` 0: the row's; `seq` and other
/// columns may have names of their own.
HybridJob job_of(const Row& row, int vocabulary = 0,
                 const char* seq = "seq_len");
/// The data-parallel degree is the row's GPUs over the other degrees; throws
/// Error where they do not divide, or where the row's dp differs.
void set_degrees(const Row& row, int tp, int pp, int cp, HybridJob& job);
/// A degree or number of chunks; NA, n/a and nothing are 1.
int degree(const Row& row, const char* column);
/// The row's degrees, micro-batch and chunks.
void set_mesh(const Row& row, HybridJob& job, const char* chunks = "",
              const char* micro_batch = "micro_batch");
/// The number of micro-batches, from global_batch.
void set_micro_batches(const Row& row, HybridJob& job);

/// Megatron-LM of 2021: full recomputation, 16-bit gradients, no overlap.
HybridJob megatron_job(const Row& row, const char* cluster = "selene",
                       int vocabulary = 0, const char* seq = "seq_len");
/// A row of Narayanan et al. 2021, table 1; of Llama 3, table 4.
HybridJob sc21_table1_job(const Row& row);
HybridJob llama3_job(const Row& row);
/// A row of MPT, over all GPUs.
HybridJob mpt_job(const Row& row, const char* cluster);

/// Throws NotExpressed for machines other than Selene.
void expect_selene(const Row& row);

/// "22B, tp 8 pp 1 dp 1, 1 x 4"; "22B, sequence 2048, 1 x 4 on 8 GPUs".
std::string describe(const std::string& model, const HybridJob& job);
std::string describe_on_gpus(const std::string& model, const HybridJob& job);

/// `work` per GPU and second.
Outcome rate_outcome(const std::string& name, const HybridJob& job,
                     const StepTime& time, const char* unit, double work,
                     double published);
/// Megatron-LM's rate, with all blocks computed again, in a step over the mesh.
Outcome tflops_outcome(const std::string& model, const HybridJob& job,
                       const Row& row);
/// The time of a step of so many FLOPs: the null model has one rate for all rows.
Outcome time_outcome(const std::string& name, const HybridJob& job,
                     const StepTime& time, const char* unit, double per_second,
                     double published, double flops);

}  // namespace shardbook::validate
