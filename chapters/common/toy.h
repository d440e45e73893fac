#pragma once

// What the toys share: the originals' random numbers, layers, ranks that print
// in order, the comparison.
//
// A toy is an example of the documents that a chapter follows, in its sizes, on
// the chapter's library. With PyTorch's random numbers it starts from the same
// weights and the same samples, so it prints what the original prints.
//
//   toy::Torch torch(0);                    // torch.manual_seed(0)
//   Linear net = torch.linear("net", 10, 10);     // nn.Linear(10, 10)
//   const Tensor x = torch.randn({20, 10});       // torch.randn(20, 10)

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/models.h"
#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/common/pipeline/stages.h"
#include "comm/process_group.h"
#include "core/layers.h"
#include "core/shards.h"

namespace shardbook::toy {

/// PyTorch's generator on a CPU: f32, the same numbers in the same order.
class Torch {
 public:
  explicit Torch(std::uint32_t seed) : bits_(seed) {}

  /// torch.rand: uniform in [0, 1).
  Tensor rand(const Shape& shape);
  /// torch.randn of 16 elements or more, which is another algorithm than that
  /// of fewer; throws Error for fewer.
  Tensor randn(const Shape& shape);
  /// nn.Linear, whose weight PyTorch stores transposed, as [out, in].
  Linear linear(const std::string& name, std::int64_t in, std::int64_t out);

 private:
  std::vector<float> uniform(std::int64_t n, double from, double to);
  std::mt19937 bits_;
};

/// Named layers, one after another; as a list for pipelines, with these values.
class Net : public ModuleOf<Net>, public LayerList {
 public:
  template <typename M>
  void add(const std::string& name, M layer) {
    layers_.emplace_back(name, std::make_unique<M>(std::move(layer)));
  }
  Module& operator[](std::size_t i) { return *layers_[i].second; }
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  int size() const override { return static_cast<int>(layers_.size()); }
  std::string name(int i) const override;
  std::unique_ptr<Module> make(int i, const InitOptions& init) const override;

 private:
  std::vector<std::pair<std::string, AnyModule>> layers_;
};

/// Runs `body` on so many ranks; returns the exit status: 0 where each rank's
/// body returns true.
int run(int ranks, const std::function<bool(ProcessGroup& world)>& body);
/// Rank 0 prints the texts of all ranks, in their order.
void print_in_order(ProcessGroup& world, const std::string& text);
/// " [0 1] [2 3]": all groups, of which each rank has one or none (null).
std::string groups_text(ProcessGroup& world, const ProcessGroup* own);

/// PyTorch's example of pipelines: a layer on each of two ranks, a batch of
/// f32 rows in micro-batches, and the mean square of the output as the loss.
struct PipelineRun {
  Tensors outputs;                      ///< of each micro-batch
  std::vector<NamedTensor> parameters;  ///< of both ranks, with gradients
  std::vector<int> most_sets;           ///< of activations, on each rank
};
PipelineRun run_pipeline(const Net& net, const Tensor& rows,
                         const pipeline::Schedule& schedule,
                         const pipeline::EngineOptions& options = {});

/// Colossal-AI's example of tensor parallelism: an MLP 256 -> 1024 -> 256 with
/// exact GELU and dropout 0.1, on 16 rows. `layers` cut its weights; each rank
/// has the part `own` of its input, which `mark` may say more of, and of its
/// output. Rank 0 prints the shapes; returns whether each rank has the output of
/// one device.
bool run_mlp(ProcessGroup& world, const LayerFactory& layers, const Shards& own,
             Tensor (*mark)(const Tensor& part) = nullptr);

/// "0.250000 -1.500000": the first five elements.
std::string values_text(const Tensor& x);

/// Prints the largest difference, in two lists of tensors that may lie on other
/// devices; returns the exit status: 0 up to 1e-6, the rounding of f32.
int compare(const Tensors& found, const Tensors& one_device);

}  // namespace shardbook::toy
