#pragma once

// The factor of the loss in f16: backward begins with it, gradients are divided
// by it, and `update` learns whether they overflowed.

#include <cstdint>
#include <map>
#include <string>

namespace shardbook {

/// The library whose sequence of scales is used.
enum class ScalerKind {
  kDeepSpeed,  ///< runtime/fp16/loss_scaler.py, DynamicLossScaler
  /// The same since 0.17.1: the scale grows one good step later, the first time
  /// and after each overflow.
  kDeepSpeed0171,
  /// runtime/fp16/fused_optimizer.py, without ZeRO (0.19.8): each overflow halves
  /// the scale whatever the hysteresis is, and the smallest scale is no error.
  kDeepSpeedStage0,
  /// core/optimizer/grad_scaler.py, DynamicGradScaler: DeepSpeed's sequence, and
  /// no error at the smallest scale.
  kMegatron,
};

struct LossScaleOptions {
  double scale = 65536;
  std::int64_t window = 1000;  ///< good steps before the scale doubles
  /// n forgives n - 1 overflows before the scale is halved (each is skipped all
  /// the same), until a full window of good steps.
  int hysteresis = 2;
  double min_scale = 1;
  /// DeepSpeed: every good step restores the hysteresis, not a full window only.
  bool consecutive_hysteresis = false;
  ScalerKind kind = ScalerKind::kDeepSpeed;
};

/// Keeps small f16 gradients from vanishing: the loss is multiplied by `scale`
/// before backward, and the gradients are divided by it afterwards. A step
/// whose gradients overflow is skipped and the scale halved; after `window`
/// good steps it is doubled.
class DynamicLossScaler {
 public:
  explicit DynamicLossScaler(const LossScaleOptions& options = {});

  double scale() const { return scale_; }
  /// Everything that `update` changes, by name; and back.
  std::map<std::string, double> state() const;
  void load_state(const std::map<std::string, double>& numbers);
  /// Records whether the step overflowed. kDeepSpeed and kDeepSpeed0171 throw
  /// Error when a scale of min_scale would fall; a scale below it rises to it.
  void update(bool overflow);

 private:
  void update_megatron(bool overflow);
  bool grows() const;

  LossScaleOptions options_;
  double scale_;
  int hysteresis_;
  std::int64_t last_overflow_ = -1;
  std::int64_t step_ = 0;
  std::int64_t good_steps_ = 0;  // Megatron's
};

}  // namespace shardbook
