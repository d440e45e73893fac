#include "chapters/03_zero_fsdp/zero/zero_memory.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace shardbook::zero {

// --- The paper's table -------------------------------------------------------

StateBytes state_bytes(DType dtype, const std::string& optimizer,
                       const OptimizerOptions& optimizer_options) {
  const auto element = static_cast<double>(dtype_bytes(dtype));
  const double stat = dtype == DType::kF64 ? 8 : 4;
  const double moments =
      optimizer != "sgd" ? 2 : (optimizer_options.momentum > 0 ? 1 : 0);
  const double master = element < 4 ? 4 : 0;
  return {element, element, moments * stat + master};
}

ModelStates model_states(int stage, double parameters, int ranks,
                         const StateBytes& bytes) {
  SB_CHECK(stage >= 0 && stage <= 3, "zero: stage ", stage,
           "; give 0 (DDP) to 3");
  const double d = ranks;
  return {parameters * bytes.parameter / (stage >= 3 ? d : 1),
          parameters * bytes.gradient / (stage >= 2 ? d : 1),
          parameters * bytes.optimizer / (stage >= 1 ? d : 1)};
}

double max_parameters(int stage, double capacity_bytes, int ranks,
                      const StateBytes& bytes) {
  return capacity_bytes / model_states(stage, 1, ranks, bytes).total();
}

// --- DeepSpeed's estimators --------------------------------------------------

DeepSpeedEstimate deepspeed_estimate(int stage, const DeepSpeedSetup& setup) {
  SB_CHECK(stage == 2 || stage == 3,
           "zero: DeepSpeed estimates stages 2 and 3, not ", stage);
  constexpr double kSlack = 1.5;  // "additional_buffer_factor"
  const double n = setup.parameters;
  const double on_node = setup.devices_per_node;
  const double all = on_node * setup.nodes;
  // Every rank builds the whole model in f32 on the host
  const double building = 4 * on_node;
  if (stage == 2) {
    if (!setup.offload_optimizer) {
      return {4 * n + std::floor(16 * n / all), n * building * kSlack};
    }
    return {2 * n, n * std::max(4 * all, 16.0) * kSlack};
  }

  const double layer = 4 * setup.largest_layer;
  if (!setup.offload_optimizer) {
    const double built = setup.zero_init ? setup.largest_layer : n;
    return {layer + std::floor(18 * n / all), built * building * kSlack};
  }
  const double kept = (setup.offload_parameters ? 18.0 : 16.0) / setup.nodes;
  const double host =
      n * (setup.zero_init ? kept : std::max(building, kept)) * kSlack;
  return {layer + (setup.offload_parameters ? 0 : std::floor(2 * n / all)),
          host};
}

}  // namespace shardbook::zero
