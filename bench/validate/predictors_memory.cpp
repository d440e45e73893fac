// Model states under ZeRO, by the formulae of the chapter.

#include <fmt/format.h>

#include <cstdlib>

#include "bench/validate/kinds.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

Outcome printed(const Row& row, const std::string& column, double predicted) {
  Outcome outcome;
  outcome.pair.predicted = predicted;
  outcome.pair.published = row.positive(column);
  outcome.last_digit = last_digit(row.text(column));
  return outcome;
}

int stage_of(const Row& row) {
  const int stage = row.integer("zero_stage");
  SB_CHECK(stage >= 0 && stage <= 3, row.place(), ": zero_stage is ", stage,
           "; give 0 to 3");
  return stage;
}

// Decimal GB of one device. Rajbhandari et al. 2020, table 1.
std::vector<Outcome> model_states(const Row& row) {
  const std::string& optimizer = row.text("optimizer");
  if (optimizer.find("(2+2+12 bytes)") == std::string::npos) {
    throw NotExpressed("optimizer \"" + optimizer + "\" has no known bytes");
  }
  const double parameters = row.positive("params");
  const int dp = row.count("dp");
  const int stage = stage_of(row);
  const zero::ModelStates states = zero::model_states(stage, parameters, dp);
  Outcome outcome =
      printed(row, "per_device_GB_reported", states.total() / 1e9);
  outcome.row =
      fmt::format("{}, stage {}, {} GPUs", row.text("model"), stage, dp);
  outcome.unit = "GB per GPU";
  outcome.pair.null_scale = parameters;
  return {outcome};
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

// Billions of parameters whose model states fit; model parallelism holds so
// many times more. Rajbhandari et al. 2020, table 2.
std::vector<Outcome> largest_models(const Row& row) {
  const char* columns[] = {"baseline_theory_B", "pos_theory_B",
                           "pos_g_theory_B", "pos_g_p_theory_B"};
  const int mp = row.count("mp"), dp = row.count("dp");
  std::vector<Outcome> outcomes;
  for (int stage = 0; stage <= 3; ++stage) {
    const double largest =
        mp * zero::max_parameters(stage, capacity_bytes(row), dp);
    Outcome outcome = printed(row, columns[stage], largest / 1e9);
    outcome.row =
        fmt::format("stage {}, {} x {} {}", stage, mp, dp, row.text("gpu"));
    outcome.unit = "billion parameters";
    outcome.pair.null_scale = mp * dp;
    outcomes.push_back(outcome);
  }
  return outcomes;
}

// GiB of one device, and of the host where the table has it.
std::vector<Outcome> deepspeed_estimates(const Row& row) {
  const int stage = stage_of(row);
  if (stage < 2) {
    throw NotExpressed("DeepSpeed has estimators of stages 2 and 3 only");
  }
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
    const std::string& words = row.text("offload");
    const auto says = [&](const char* word) {
      return words.find(word) != std::string::npos;
    };
    setup.offload_optimizer = says("optimizer");
    setup.offload_parameters = says("params");
    setup.zero_init = !says("zero_init=0");
  }
  const auto estimate = zero::deepspeed_estimate(stage, setup);
  constexpr double kGiB = 1 << 30;
  const std::string name =
      fmt::format("{}, stage {}, {} GPUs{}{}", row.text("model"), stage,
                  setup.devices_per_node * setup.nodes,
                  setup.offload_optimizer ? ", optimizer on the host" : "",
                  setup.offload_parameters ? ", parameters too" : "");
  std::vector<Outcome> outcomes = {
      printed(row, "per_gpu_GiB", estimate.device_bytes / kGiB)};
  outcomes[0].row = name;
  outcomes[0].unit = "GiB per GPU";
  outcomes[0].pair.null_scale = setup.parameters;
  if (row.has("per_cpu_GiB")) {
    outcomes.push_back(printed(row, "per_cpu_GiB", estimate.host_bytes / kGiB));
    outcomes[1].row = name;
    outcomes[1].unit = "GiB per host";
    outcomes[1].pair.null_scale = setup.parameters;
  }
  return outcomes;
}

}  // namespace

std::vector<Kind> memory_kinds() {
  std::vector<Kind> kinds;
  kinds.push_back({"zero_table1_memory",
                   {"model", "params", "optimizer", "zero_stage", "dp",
                    "per_device_GB_reported"},
                   true,
                   digits_aim(),
                   model_states,
                   ""});
  kinds.push_back(
      {"zero_table2_max_model",
       {"mp", "gpu", "dp", "baseline_theory_B", "pos_theory_B",
        "pos_g_theory_B", "pos_g_p_theory_B"},
       false,
       mean_aim(0.01, "MAPE within 1 %"),
       largest_models,
       "the paper multiplies the digits of its first row by the degree of "
       "model parallelism, and prints trillions with one digit; measured sizes "
       "(baseline_measured_B, pos_measured_B) are not predicted, as the paper "
       "names no batch"});
  kinds.push_back({"deepspeed_memory_estimator",
                   {"model", "params", "largest_layer_params", "gpus",
                    "zero_stage", "per_gpu_GiB"},
                   true,
                   digits_aim(),
                   deepspeed_estimates,
                   ""});
  return kinds;
}

}  // namespace shardbook::validate
