#pragma once

// Does a run on many ranks compute what one device computes?
//
// The sums of the two are rounded differently, so their numbers differ a
// little. This is how much they may differ, and why. All differences are
// relative: of a loss |a - b| / |b|; of the first step's gradient, whose
// weights are equal, the same for its norm (Adam forgets the scale of
// gradients, so weights alone would not show that one is twice too large); of
// each parameter ||a - b|| / ||b||.
//
// 1. The tolerance follows the narrowest type that the run computes in or
//    sends: f64 1e-10 per step, f32 1e-5 for one step and 1e-3 beyond, 16 bits
//    and TF32 5e-2, there over all parameters together. A run on GPUs is
//    compared with a run on one GPU, which has the same kernels. The same
//    tolerances hold, since only the order of sums differs.
//
// 2. Adam divides by the size of the gradient. Where an element's gradient is
//    nearly zero, it consists of rounding, from which Adam makes up to a whole
//    step. Errors of a sum of n terms grow like sqrt(n); gradients are
//    sums of thousands, in a few layers one after the other. So each element of
//    a gradient g is taken to be known up to
//
//      e = kGradientRounding * unit * rms(g)
//
//    over the parameter, and step k may carry element i apart by
//
//      lr * min(kTwoSteps, e / (sqrt(v_i) + eps))
//
//    with Adam's second moment v, corrected for bias. No step is longer than
//    max(1, (1 - beta1) / sqrt(1 - beta2)) lr (Kingma and Ba 2015, section
//    2.1); kTwoSteps is twice that. The sum over the steps is the element's
//    *slack*; rows of a table that no sample looks up have none. Only the part
//    of a difference beyond the slack counts. Where weight decay is part of the
//    gradient ("adam", not "adamw"), weights that differ make gradients differ:
//    e grows by weight_decay times the slack so far. For an element with a usual
//    gradient that is nearly all of it; the bias of attention's keys, whose
//    gradient is zero except for rounding, has slack for every move it makes.
//
// 3. In the course of many steps differences grow, as in any dynamical system:
//    how fast depends on model, data and rate. Where a run is beyond the
//    tolerance, one device trains once more, from weights that differ in their
//    last bit. Both runs of that device are right. The order of sums may make
//    kLastBitFactor times the difference that the last bit makes, but never
//    more than kMostAllowed: beyond that, equality would say nothing.

#include <functional>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"
#include "chapters/common/run/options.h"
#include "chapters/common/run/training.h"

namespace shardbook {

constexpr double kGradientRounding = 128;
constexpr double kLastBitFactor = 10;
constexpr double kMostAllowed = 5e-2;

/// Equality with one device.
struct Parity {
  bool checked = false;
  /// Over losses and elements, slack included; infinite where one is NaN.
  double max_abs = 0;
  double max_rel = 0;  ///< beyond the slack
  double tolerance = 0;
  /// The effect of the last bit on one device; negative: not needed.
  double last_bit = -1;
  bool finite = true;  ///< no NaN or infinity in numbers or differences
  /// Of the losses and parameters of one device. Where a run is not finite and
  /// one device is, the run is wrong; where neither is, training diverged, and
  /// there is nothing to compare.
  bool one_device_finite = true;
  std::string not_finite;  ///< the run's first parameter that is not finite
  bool passed = false;
};

/// The type that decides the tolerance: options.narrowest or options.dtype.
DType narrowest_of(const Options& options);
/// Records that a part of the run computes in `dtype`, or sends it.
void narrow(Options& options, DType dtype);
/// The first of the three rules above.
double parity_tolerance(DType dtype, std::int64_t steps);

/// Compares with a run of one device by rules 1 and 2: all of its parameters,
/// by name.
Parity compare_runs(const Options& options, const ReferenceRun& run,
                    const ReferenceRun& one_device);
/// Compares by all three rules. `train_one` trains one device by its options.
Parity compare_with_one_device(
    const Options& options, const ReferenceRun& run,
    const std::function<ReferenceRun(const Options& options)>& train_one);

/// `train` for the run that others are compared with: also sums the slack, and
/// returns all results. `optimizer` has all `parameters` of the model.
ReferenceRun train_yardstick(
    const Options& options, Optimizer& optimizer,
    const std::vector<NamedTensor>& parameters,
    const std::function<StepResult(std::int64_t)>& step);

/// With options.nudged: moves each weight up or down by one unit in the last
/// place of the narrowest type.
void nudge(const Options& options, const Tensors& parameters);

}  // namespace shardbook
