// Whatever the text of an engine's config is, reading it ends in a config that is
// written and read again alike, or in an Error that names the file and can be
// read.

#include <cmath>

#include "chapters/15_engine/config.h"
#include "core/check.h"
#include "tests/fuzz/fuzz.h"

namespace {

using shardbook::check_message;
using shardbook::promise;
using shardbook::engine::BatchSizes;
using shardbook::engine::DeepSpeedConfig;

constexpr const char* kLabel = "fuzzed-input";

void check_batch(const BatchSizes& given) {
  for (const std::int64_t dp : {1, 3, 65536}) {
    try {
      const BatchSizes all = resolve_batch(given, dp);
      promise(all.micro > 0 && all.accumulation > 0);
      promise(all.train == all.micro * all.accumulation * dp);
    } catch (const shardbook::Error& error) {
      check_message(error.what(), "");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const auto config = DeepSpeedConfig::parse(text, kLabel);
    const std::string written = config.to_json();
    promise(DeepSpeedConfig::parse(written, kLabel).to_json() == written);
    promise(config.zero.stage >= 0 && config.zero.stage <= 3);
    promise(std::isfinite(config.optimizer.params.lr));
    check_batch(config.batch);
  } catch (const shardbook::Error& error) {
    check_message(error.what(), kLabel);
  }
  try {
    shardbook::engine::fill_auto(
        text, kLabel,
        {{"/train_batch_size", "16"}, {"/optimizer/params/lr", "0.1"}});
  } catch (const shardbook::Error& error) {
    check_message(error.what(), kLabel);
  }
  return 0;
}

std::vector<std::string> shardbook::fuzz_seeds() {
  return {
      "", "{}",
      R"({"train_batch_size": 16, "optimizer": {"type": "Adam", "params":
          {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps":
          1000}}, "gradient_clipping": 1.0, "fp16": {"enabled": true,
          "initial_scale_power": 15}, "zero_optimization": {"stage": 2,
          "reduce_bucket_size": 5e7, "cpu_offload": true}})",
      R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps":
          8, "bf16": {"enabled": true}, "pipeline": {"stages": 4},
          "shardbook": {"tensor_parallel": {"size": 2}, "experts":
          {"num_experts": [2, 4]}}})",
      R"({"optimizer": {"type": "SGD", "params": {"momentum": 0.9, "nesterov":
          true}}, "scheduler": {"type": "WarmupDecayLR", "params":
          {"total_num_steps": 8, "warmup_num_steps": 4}}, "train_batch_size":
          "auto"})"};
}
