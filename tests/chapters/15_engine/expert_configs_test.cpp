// Experts that a config puts in the place of a model's MLPs.

#include <cmath>

#include "tests/chapters/15_engine/choice_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::engine {
namespace {

std::string experts(const std::string& keys, const std::string& zero,
                    const std::string& more = "") {
  return R"({"gradient_accumulation_steps": 2, "zero_optimization": {"stage": )" +
         zero +
         R"(}, "shardbook": {"experts": {"num_experts": 4, "ep_size": 2)" +
         keys + "}}" + more + "}";
}

TEST(ExpertConfigs, KeysOfTheGateHoldEveryClaim) {
  for (const std::string keys :
       {R"(, "noisy_gate_policy": "RSample", "min_capacity": 0)",
        R"(, "noisy_gate_policy": "Jitter", "top_k": 2, "aux_coefficient": 0)",
        R"(, "drop_tokens": false, "use_rts": false,
           "aux_coefficient": 0.5)"}) {
    SCOPED_TRACE(keys);
    expect_claims(train_config(options_for(4), experts(keys, "2")));
  }
}

// Each scale up to 2^22 overflows on some ranks or on none, and the one device
// skips the same step. A skipped step sends no parameters.
TEST(ExpertConfigs, F16OverflowsWhereARankDoes) {
  bool has_updated = false, has_skipped = false;
  for (const std::string zero : {"0", "1", "2", R"(2, "cpu_offload": true)"}) {
    for (int power = 15; power <= 23; power += kSanitized ? 4 : 1) {
      const std::string config =
          experts(R"(, "use_data_before_expert_parallelism": true)", zero,
                  R"(, "fp16": {"enabled": true, "hysteresis": 1,
              "initial_scale_power": )" +
                      std::to_string(power) + "}");
      SCOPED_TRACE(config);
      Options options = options_for(4);
      options.dtype = DType::kF32;
      options.steps = 1;
      const Report report = train_config(options, config);
      expect_claims(report);
      const bool is_finite = std::isfinite(report.grad_norms.at(0));
      (is_finite ? has_updated : has_skipped) = true;
    }
  }
  EXPECT_TRUE(has_updated && has_skipped);
}

}  // namespace
}  // namespace shardbook::engine
