#pragma once

// Training jobs from the rows of tables, and the work that they do.

#include <cstdint>
#include <string>

#include "bench/validate/jobs.h"
#include "bench/validate/table.h"

namespace shardbook::validate {

// More would be no model of this time, and would take long to simulate.
constexpr int kMaxLayers = 2000;
constexpr int kMaxSize = 1 << 20;
constexpr int kMaxMicroBatchesPerRank = 4096;

/// Layers, sizes, sequence and GPUs; positions are as many as the sequence has.
Job job_of(const Row& row, int vocab);
/// How many micro-batches of each replica make the global batch.
std::int64_t micro_batches_of(const Row& row, const Job& job,
                              std::int64_t replicas);

double tokens_per_step(const Job& job);
/// Work of a step with recomputation: Narayanan et al. 2021, equation 3.
double megatron_flops(const Job& job);

/// "22B, sequence 2048, 1 x 4 on 8 GPUs".
std::string describe(const std::string& model, const Job& job);

}  // namespace shardbook::validate
