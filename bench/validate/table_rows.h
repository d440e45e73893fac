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

/// Layers and sizes of a GPT, and its sequence. `vocabulary` 0: the row's; `seq`
/// may have a name of its own.
HybridJob gpt_job(const Row& row, int vocabulary = 0, const char* seq = "seq");
/// A column that may be empty: 0.
bool is_set(const Row& row, const char* column);
/// A row of a table of jobs (bench/own_rows.md).
HybridJob read_job(const Row& row);

/// "22B, sequence 2048, 1 x 4 on 8 GPUs".
std::string describe_on_gpus(const std::string& model, const HybridJob& job);

}  // namespace shardbook::validate
