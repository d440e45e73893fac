#pragma once

// A result as text, as JSON, and as the commands that train with it.

#include <string>

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
/// "nvlink 12.3 GB, network 4.5 GB".
std::string links_text(const HybridStep& step);

}  // namespace shardbook::planner
