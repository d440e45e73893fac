// The chapter's own options.

#include "chapters/04_model_parallel/model_parallel_strategy.h"
#include "chapters/04_model_parallel/split_sweep.h"
#include "chapters/common/pipeline/partition.h"
#include "core/check.h"

namespace shardbook::model_parallel {

Options default_options() {
  Options options;
  options.world_size = 2;
  options.model = "resnet18";
  options.optimizer = "sgd";
  options.cluster = "kaggle-t4x2";
  options.steps = 6;
  return options;
}

void add_options(CommandLine& line, Settings& settings, Extras& extras) {
  settings.loss.clear();  // check_settings chooses one by the model
  line.add({"--variant", may_differ::kPlace}, &settings.variant,
           "one device, two in turn, or two at the same time", kVariants);
  line.add({"--split-size", may_differ::kSums}, &settings.split_size,
           "rows of a split", 1);
  line.add({"--partition", may_differ::kPlace}, &settings.partition,
           kPartitionHelp + std::string("; half: after layer2 of a ResNet"));
  line.refuse("--micro-batches",
              "splits are counted in rows; give --split-size");
  line.add("--loss", &settings.loss,
           "mse (against one-hot labels; the default for images) "
           "or cross_entropy")
      .otherwise("cross_entropy");
  line.refuse("--toy", "./shardbook toy model_parallel runs it");
  line.add({"--sweep", may_differ::kOutput}, &extras.sweep,
           "also measure these split sizes, such as 1,3,5,8,10,12,20,40,60");
  line.add({"--repeats", may_differ::kOutput}, &extras.repeats,
           "measured steps per variant of the sweep", 1);
  line.after_parse([&extras] {
    if (!extras.sweep.empty()) split_sizes(extras.sweep);
  });
}

void check_settings(const Options& options, Settings& settings) {
  SB_CHECK(options.world_size == 2, "--world-size ", options.world_size,
           ": the model is cut once; give 2");
  std::string& loss = settings.loss;
  SB_CHECK(loss.empty() || loss == "mse" || loss == "cross_entropy", "--loss ",
           loss, ": give mse or cross_entropy");
  if (loss.empty()) {
    loss =
        ModelConfig::read(options.model).is_image() ? "mse" : "cross_entropy";
  }
  // One device computes the whole batch at once
  if (settings.variant == "single") settings = on_one_device(settings);
}

}  // namespace shardbook::model_parallel
