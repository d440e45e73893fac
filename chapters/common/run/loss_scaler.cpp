#include "chapters/common/run/loss_scaler.h"

#include <algorithm>

#include "core/check.h"

namespace shardbook {

DynamicLossScaler::DynamicLossScaler(const LossScaleOptions& options)
    : options_(options),
      scale_(options.scale),
      hysteresis_(options.hysteresis) {}

bool DynamicLossScaler::grows() const {
  const std::int64_t since = step_ - last_overflow_;
  if (options_.kind == ScalerKind::kDeepSpeed) {
    return since % options_.window == 0;
  }
  return since > 1 && (since - 1) % options_.window == 0;
}

void DynamicLossScaler::update(bool overflow) {
  if (options_.kind == ScalerKind::kMegatron) {
    update_megatron(overflow);
    return;
  }
  if (overflow) {
    const bool is_unsharded = options_.kind == ScalerKind::kDeepSpeedStage0;
    if (hysteresis_ == 1 || is_unsharded) {
      SB_CHECK(scale_ != options_.min_scale || is_unsharded,
               "loss scale: gradients overflow at the smallest scale ",
               options_.min_scale, "; the model diverges");
      scale_ = std::max(scale_ / 2, options_.min_scale);
    } else {
      hysteresis_ -= 1;
    }
    last_overflow_ = step_;
  } else {
    if (options_.consecutive_hysteresis) hysteresis_ = options_.hysteresis;
    if (grows()) {
      scale_ *= 2;
      hysteresis_ = options_.hysteresis;
    }
  }
  step_ += 1;
}

void DynamicLossScaler::update_megatron(bool overflow) {
  if (overflow) {
    good_steps_ = 0;
    hysteresis_ -= 1;
    if (hysteresis_ <= 0) scale_ = std::max(scale_ / 2, options_.min_scale);
    return;
  }
  good_steps_ += 1;
  if (good_steps_ < options_.window) return;
  good_steps_ = 0;
  hysteresis_ = options_.hysteresis;
  scale_ *= 2;
}

std::map<std::string, double> DynamicLossScaler::state() const {
  return {{"loss scale", scale_},
          {"loss scale's forgiveness", hysteresis_},
          {"loss scale's last overflow", static_cast<double>(last_overflow_)},
          {"loss scale's step", static_cast<double>(step_)},
          {"loss scale's good steps", static_cast<double>(good_steps_)}};
}

void DynamicLossScaler::load_state(
    const std::map<std::string, double>& numbers) {
  scale_ = numbers.at("loss scale");
  hysteresis_ = static_cast<int>(numbers.at("loss scale's forgiveness"));
  last_overflow_ =
      static_cast<std::int64_t>(numbers.at("loss scale's last overflow"));
  step_ = static_cast<std::int64_t>(numbers.at("loss scale's step"));
  good_steps_ =
      static_cast<std::int64_t>(numbers.at("loss scale's good steps"));
}

}  // namespace shardbook
