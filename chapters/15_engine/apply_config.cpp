// The config's values go into the options that all chapters share.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/15_engine/engine.h"
#include "chapters/15_engine/strategies.h"
#include "core/check.h"

namespace shardbook::engine {
namespace {

class Filler {
 public:
  Filler(const DeepSpeedConfig& config, const Given& given)
      : config_(config), given_(given) {}

  /// Sets `option` to the config's value; a value given on the command line
  /// must be equal.
  template <typename T>
  void fill(const char* flag, T& option, const std::string& key,
            const T& value) {
    if (option == value) return;
    for (const auto& [name, text] : given_) {
      SB_CHECK(name != flag, flag, " ", text, ": ", config_.label, " has ", key,
               " ", fmt::format("{}", value), "; leave one of them out");
    }
    option = value;
  }
  bool is_given(const std::string& flag) const {
    return std::any_of(given_.begin(), given_.end(),
                       [&](const auto& each) { return each.first == flag; });
  }
  /// Refuses the option together with this section.
  void refuse(const char* flag, const std::string& key) {
    for (const auto& [name, text] : given_) {
      SB_CHECK(name != flag, flag, " ", text, ": ", config_.label, " has ", key,
               "; leave one of them out");
    }
  }

 private:
  const DeepSpeedConfig& config_;
  const Given& given_;
};

}  // namespace

void apply_config(const DeepSpeedConfig& config, int dp, const Given& given,
                  Options& options) {
  Filler filler(config, given);
  if (config.batch.train > 0 || config.batch.micro > 0) {
    const BatchSizes sizes = resolve_batch(config.batch, dp);
    filler.fill("--batch", options.batch,
                config.batch.train > 0
                    ? "/train_batch_size"
                    : "/train_micro_batch_size_per_gpu for a batch of",
                sizes.train);
  }
  const OptimizerConfig& optimizer = config.optimizer;
  if (!optimizer.type.empty()) {
    OptimizerOptions& to = options.optimizer_options;
    const OptimizerOptions& from = optimizer.params;
    const std::string params = "/optimizer/params/";
    filler.fill("--optimizer", options.optimizer, "/optimizer/type for",
                optimizer.name());
    filler.fill("--lr", to.lr, params + "lr", from.lr);
    filler.fill("--weight-decay", to.weight_decay, params + "weight_decay",
                from.weight_decay);
    filler.fill("--momentum", to.momentum, params + "momentum", from.momentum);
    filler.fill("--nesterov", to.nesterov, params + "nesterov", from.nesterov);
    filler.fill("--beta1", to.beta1, params + "betas with", from.beta1);
    filler.fill("--beta2", to.beta2, params + "betas with", from.beta2);
    filler.fill("--eps", to.eps, params + "eps", from.eps);
    to.dampening = from.dampening;
  }
  if (!filler.is_given("--clip")) options.clip = config.gradient_clipping;
  if (!config.scheduler.type.empty()) {
    const std::string key = "/scheduler/type " + config.scheduler.type;
    filler.refuse("--lr-schedule", key);
    if (config.filled_from.count("--warmup") == 0) {
      filler.refuse("--warmup", key);
    }
    OptimizerConfig as_given;
    as_given.params = options.optimizer_options;
    options.rate = schedule_of(config, as_given);
  }
  const DType dtype = config.dtype(options.dtype);
  if (dtype != options.dtype) {
    const std::string key = config.bf16 ? "/bf16/enabled" : "/fp16/enabled";
    filler.refuse("--dtype", key);
    options.dtype = dtype;
  }
  SB_CHECK(
      options.dtype != DType::kF16 || config.fp16.enabled,
      "--dtype f16: ", config.label,
      " has no /fp16/enabled, which scales the loss; give that in place of "
      "the option");
  if (const auto wire = config.wire()) narrow(options, *wire);
}

}  // namespace shardbook::engine
