#pragma once

// A result as text, as JSON, and as the commands that train with it; where a plan's
// memory and time come from; and what a model's sizes alone tell.

#include <string>
#include <vector>

#include "chapters/common/models/counted_model.h"
#include "chapters/planner/search.h"

namespace shardbook::planner {

/// The best plans with their figures, and why the others were rejected. With
/// `config_file`, which holds config_of's result, also the engine's command.
/// Without commands where no chapter trains the model.
std::string result_text(const PlanRequest& request, const PlanResult& result,
                        const std::string& config_file = "");
/// The best plan of each strategy, by the time of its step; then those that do
/// not fit.
std::string strategies_text(const PlanRequest& request,
                            std::vector<Strategy> strategies);
/// The plans as one JSON object; with explain_json's under "explain".
std::string result_json(const PlanRequest& request, const PlanResult& result,
                        bool explains = false);

/// The command that trains with a plan in its chapter, on GPUs; on shapes with
/// `simulates`.
std::string command_of(const PlanRequest& request, const Plan& plan,
                       bool simulates);
/// A config with DeepSpeed's keys, for the engine; settings without such a key
/// are in its section "shardbook".
std::string config_of(const PlanRequest& request, const Plan& plan);
/// The engine's command for it, on GPUs: options that have no key in the file.
std::string engine_command_of(const PlanRequest& request,
                              const std::string& file);

/// "1.23 TB", "45.6 GB", "7.8 MB".
std::string bytes_text(double bytes);
/// "1.23 s", "45.6 ms".
std::string time_text(double seconds);
/// A line of text for each: what a plan or a count leaves out.
std::string notes_text(const std::vector<std::string>& remarks);
/// "nvlink 12.3 GB, network 4.5 GB".
std::string links_text(const HybridStep& step);

// --- Parts: explain.cpp ------------------------------------------------------

// Each part has its formula in digits, and the page that derives it. The parts of
// one kind add up to its total.

struct ExplainedPart {
  std::string kind;     ///< "optimizer", "compute"
  double value = 0;     ///< bytes, or seconds
  std::string formula;  ///< "8030261248 parameters x 12 bytes / 64 ranks"
  std::string page;     ///< "chapters/03_zero_fsdp/README.md#the-problem"
};

struct Explanation {
  std::vector<ExplainedPart> memory, time;
  std::vector<ExplainedPart> sent;  ///< kind: of the link
};
Explanation explain(const PlanRequest& request, const Prediction& prediction);

/// The best plan of the result, and why the next one lost: the first with other
/// degrees, or else the second. Empty where none fits.
std::string explain_text(const PlanRequest& request, const PlanResult& result);
/// The same as a JSON object {memory, time, sent, timeline, next}. timeline: null, or of
/// each stage the actions [kind, micro-batch, chunk, begin, end] and the bytes of
/// activations kept from a moment on; a long step's with fewer micro-batches.
std::string explain_json(const PlanRequest& request, const PlanResult& result);

// --- What an answer may promise: measured.cpp --------------------------------

/// How far predicted steps were from measured ones of one kind, on one family of
/// devices. Those of bench/validate.
struct Measured {
  const char* device;  ///< "a100"
  const char* kind;    ///< "pipelines"
  int steps = 0;
  double mean = 0, most = 0;  ///< |predicted / measured - 1|, in percent
};

/// What decides how long a step takes: "experts", "context parallelism",
/// "pipelines", "ZeRO-3", "tensor parallelism" or "replicas".
std::string kind_of(const HybridJob& job);
/// "a100" of "a100-80gb".
std::string family_of(const sim::Cluster& cluster);
/// Null where no such step was compared.
const Measured* measured(const HybridJob& job);
/// A sentence on it.
std::string measured_text(const HybridJob& job);

// --- Without a plan: count_report.cpp ----------------------------------------

/// A model, and the samples that it is counted on.
struct CountRequest {
  std::string name;  ///< "llama-3.1-8b", or a file
  CountedModel model;
  std::int64_t seq = 0;  ///< tokens of a sample
  DType dtype = DType::kBF16;
};

/// Parameters in all and per part, operations per token, keys and values, and the
/// memory of one device that trains on one sample at a time.
std::string count_text(const CountRequest& request);
/// The same as one JSON object. Activations are null where they are not known.
std::string count_json(const CountRequest& request);

}  // namespace shardbook::planner
