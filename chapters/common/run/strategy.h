#pragma once

// A chapter's part of a program, next to the shell (program.h): a way to train
// one model on several devices, and the bill for it.
//
//   class DdpStrategy : public Strategy { ... };
//   DdpStrategy strategy(options, setup, mesh.group("dp"));
//   run.train(options, strategy);
//
// Each rank has a strategy of its own. Every call on it is collective: all
// ranks make the same calls in the same order.

#include <string>
#include <vector>

#include "chapters/common/run/report.h"
#include "chapters/common/run/training.h"
#include "chapters/common/run/training_state.h"
#include "comm/device_copies.h"
#include "core/optim.h"

namespace shardbook {

class Strategy {
 public:
  virtual ~Strategy() = default;

  /// One optimizer step on global batch `step`.
  virtual StepResult step(std::int64_t step) = 0;
  /// Called after the last step: ends the work that is under way.
  virtual void finish() {}
  /// The optimizer whose learning rate the schedule sets.
  virtual Optimizer& optimizer() = 0;

  /// One for each device that this rank works on. Read after training.
  virtual std::vector<Bill> bills() = 0;
  /// A command whose step has a closed form: "ch02_ddp --cluster textbook".
  virtual std::string closed_form_command() const { return ""; }
  /// False where the run's time cannot be predicted on shapes: it repeated a
  /// step, or left one out.
  virtual bool has_predictable_time() const { return true; }

  /// All parameters and buffers, whole, under the names that they have on one
  /// device; on rank 0, where they lie on the host. Empty on other ranks.
  virtual std::vector<NamedTensor> full_state() = 0;

  /// This rank's part of everything that training changes, for checkpoints; the
  /// values are views, to which loading writes. Called between steps: ends what is
  /// under way. Throws BadCheckpoint with the reason where a training cannot be
  /// kept. Collective.
  virtual TrainingState state();
  /// The whole model with full_state's values, for --save and --logits; on rank 0.
  virtual LoadedModel whole_model(const Options& options,
                                  const std::vector<NamedTensor>& state) {
    return model_with(options, state);
  }

  /// Copies between the devices of this rank; null where it has one device.
  virtual CopyLedger* copies() { return nullptr; }
  /// Text that rank 0 prints above the report; empty for most chapters.
  virtual std::string remarks() { return ""; }
  /// More keys of the JSON object, and their JSON; rank 0's are printed.
  /// Collective.
  virtual std::vector<std::pair<std::string, std::string>> more() { return {}; }
};

}  // namespace shardbook
