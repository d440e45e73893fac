#pragma once

// DeepSpeed's example on CIFAR-10 as a program: the options of its script, its
// config, and the training of the net by the engine (chapter 15). A step is the
// script's loop: forward, backward, step.
//
// DeepSpeedExamples, training/cifar/cifar10_deepspeed.py.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chapters/13_moe/cifar.h"
#include "chapters/13_moe/groups.h"
#include "chapters/15_engine/engine.h"
#include "chapters/common/run/options.h"
#include "chapters/common/run/strategy.h"
#include "comm/device_mesh.h"

namespace shardbook::moe {

struct CifarOptions {
  ConvNetOptions net;  ///< no layers of experts without --moe
  int ep = 0;          ///< 0: as many ranks as possible
  int stage = 0;
  bool cpu_offload = false;
  std::string dtype = "fp16";
};

/// The script's options under their own names, and those of all programs that
/// have a meaning here. Sets batch, optimizer, rate and dtype in `options`, and
/// checks everything, when the line has been parsed.
void add_cifar_options(CommandLine& line, Options& options,
                       CifarOptions& cifar);
/// The script's config.
engine::DeepSpeedConfig cifar_config(const CifarOptions& cifar);
/// The sizes of the mesh, with ep chosen. Throws Error that names the option for
/// sizes that do not divide.
GroupSizes cifar_groups(const CifarOptions& cifar, int ranks);

/// Loads of the experts in training, and then the accuracies.
struct CifarResults {
  std::map<std::string, std::vector<std::int64_t>> loads;
  double training = 0, test = 0;
};

class CifarStrategy : public Strategy {
 public:
  /// `mesh` has the axes of expert_topology. Data outlives the object.
  /// Collective.
  CifarStrategy(const Options& options, const CifarOptions& cifar,
                const CifarData& data, DeviceMesh& mesh);

  StepResult step(std::int64_t step) override;
  Optimizer& optimizer() override { return engine_->optimizer(); }
  std::vector<Bill> bills() override;
  std::vector<NamedTensor> full_state() override {
    return engine_->full_state();
  }
  /// Groups, loads and accuracies. Collective, as `more` is.
  std::string remarks() override;
  std::vector<std::pair<std::string, std::string>> more() override;

  ConvNet& net() { return net_; }
  /// The fraction of images whose label has the largest logit. Images are routed
  /// in fours, as the script's test does. Collective.
  double accuracy(const CifarImages& images);

 private:
  const CifarResults& results();

  const Options options_;
  const CifarOptions cifar_;
  const CifarData& data_;
  DeviceMesh& mesh_;
  ProcessGroup& world_;
  std::shared_ptr<MoeRecord> record_ = std::make_shared<MoeRecord>();
  ConvNet net_;
  std::unique_ptr<engine::Engine> engine_;
  std::optional<CifarResults> results_;
};

/// The same training on one device without an engine. It routes the images of each
/// rank by themselves, and in f16 leaves out the steps that overflow on ranks.
ReferenceRun train_cifar_reference(const Options& options,
                                   const CifarOptions& cifar,
                                   const CifarData& data);

}  // namespace shardbook::moe
