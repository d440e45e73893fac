// Model states under ZeRO, by the formulae of the chapter.

#include <fmt/format.h>

#include <cstdlib>

#include "bench/validate/kinds.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

/// A value as printed, to be matched digit by digit.
Outcome printed(const Row& row, const std::string& name, const char* unit,
                const char* column, double predicted, double null_scale) {
  return {name,
          unit,
          {predicted, row.positive(column), null_scale},
          "formula",
          last_digit(row.text(column))};
}

int stage_of(const Row& row) {
  const int stage = row.integer("zero_stage");
  SB_CHECK(stage >= 0 && stage <= 3, row.place(), ": zero_stage is ", stage,
           "; give 0 to 3");
  return stage;
}

/// "V100-32GB": 32e9.
double capacity_bytes(const Row& row) {
  const std::string& gpu = row.text("gpu");
  const std::size_t dash = gpu.rfind('-');
  const double gigabytes = dash == std::string::npos
                               ? 0
                               : std::strtod(gpu.c_str() + dash + 1, nullptr);
  SB_CHECK(gigabytes > 0, row.place(), ": gpu is \"", gpu,
           "\"; give one with its memory, such as V100-32GB");
  return gigabytes * 1e9;
}

}  // namespace

// Decimal GB of one device. Rajbhandari et al. 2020, table 1.
std::vector<Outcome> model_states(const Row& row) {
  const std::string& optimizer = row.text("optimizer");
  require(row.says("optimizer", "(2+2+12 bytes)"),
          "optimizer \"" + optimizer + "\" has no known bytes");
  const double parameters = row.positive("params");
  const int dp = row.count("dp");
  const int stage = stage_of(row);
  return {printed(
      row, fmt::format("{}, stage {}, {} GPUs", row.text("model"), stage, dp),
      "GB per GPU", "per_device_GB_reported",
      zero::model_states(stage, parameters, dp).total() / 1e9, parameters)};
}

// Billions of parameters whose model states fit; model parallelism of degree mp
// holds mp times as many. Rajbhandari et al. 2020, table 2.
std::vector<Outcome> largest_models(const Row& row) {
  const char* columns[] = {"baseline_theory_B", "pos_theory_B",
                           "pos_g_theory_B", "pos_g_p_theory_B"};
  const int mp = row.count("mp"), dp = row.count("dp");
  std::vector<Outcome> outcomes;
  for (int stage = 0; stage <= 3; ++stage) {
    const double largest =
        mp * zero::max_parameters(stage, capacity_bytes(row), dp);
    outcomes.push_back(printed(
        row,
        fmt::format("stage {}, {} x {} {}", stage, mp, dp, row.text("gpu")),
        "billion parameters", columns[stage], largest / 1e9, mp * dp));
  }
  return outcomes;
}

// GiB of one device, and of the host where the table has it.
std::vector<Outcome> deepspeed_estimates(const Row& row) {
  const int stage = stage_of(row);
  require(stage >= 2, "DeepSpeed has estimators of stages 2 and 3 only");
  zero::DeepSpeedSetup setup;
  setup.parameters = row.positive("params");
  setup.largest_layer = row.positive("largest_layer_params");
  setup.devices_per_node = row.count("gpus");
  if (row.has("nodes")) setup.nodes = row.count("nodes");
  if (row.has("offload_optimizer")) {
    setup.offload_optimizer = row.flag("offload_optimizer");
    setup.offload_parameters = row.flag("offload_param");
    setup.zero_init = row.flag("zero_init");
  } else {
    // In words: "offload params+optimizer cpu, zero_init=1"
    setup.offload_optimizer = row.says("offload", "optimizer");
    setup.offload_parameters = row.says("offload", "params");
    setup.zero_init = !row.says("offload", "zero_init=0");
  }
  const auto estimate = zero::deepspeed_estimate(stage, setup);
  constexpr double kGiB = 1 << 30;
  const std::string name =
      fmt::format("{}, stage {}, {} GPUs{}{}", row.text("model"), stage,
                  setup.devices_per_node * setup.nodes,
                  setup.offload_optimizer ? ", optimizer on the host" : "",
                  setup.offload_parameters ? ", parameters too" : "");
  std::vector<Outcome> outcomes = {
      printed(row, name, "GiB per GPU", "per_gpu_GiB",
              estimate.device_bytes / kGiB, setup.parameters)};
  if (row.has("per_cpu_GiB")) {
    outcomes.push_back(printed(row, name, "GiB per host", "per_cpu_GiB",
                               estimate.host_bytes / kGiB, setup.parameters));
  }
  return outcomes;
}

}  // namespace shardbook::validate
