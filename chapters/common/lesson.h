#pragma once

// What the lessons share: a small model, its data, and the comparison with one
// device. Every lesson trains ten steps in f64, with SGD and without dropout.
//
//   lesson::Result train(ProcessGroup& dp) { ... }          // the lesson
//   int main() { return lesson::compare(4, train, bill); }

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/data.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/options.h"
#include "chapters/common/run/training.h"
#include "comm/launch.h"
#include "comm/process_group.h"
#include "core/ops.h"
#include "core/optim.h"

namespace shardbook::lesson {

constexpr int kSteps = 10, kBatch = 12, kSequence = 12;
/// Four blocks of width 24, twelve heads, 48 tokens.
extern const char* const kGpt;
/// An embedding and three linear layers: 48 -> 48 -> 192 -> 48 -> 48.
extern const char* const kMlp;
/// Inputs and outputs of these three layers.
const std::pair<double, double> kMlpLayers[] = {{48, 192}, {192, 48}, {48, 48}};

/// Ten steps of SGD on `model`, as options of chapter 00.
Options options(const std::string& model = kGpt);
ModelConfig config(const std::string& model = kGpt);
/// Adam would hide a gradient of the wrong scale.
std::unique_ptr<Optimizer> sgd(const Tensors& parameters);
/// The same weights from the same seed on every rank.
InitOptions init();
/// For weights that come from other ranks.
InitOptions no_values();
/// Samples `rank`, rank + ranks, rank + 2 ranks, ... of a step's batch.
Batch batch(int step, int rank = 0, int ranks = 1);
/// A tied parameter counts once.
double num_parameters(const std::string& model = kGpt);

/// Of the ranks' losses. The message counts.
double sum_over(const Tensor& loss, ProcessGroup& group);
double mean_over(const Tensor& loss, ProcessGroup& group);
/// [n, n]: 1 where token first_query + i may see first_key + j, else 0.
Tensor visible(std::int64_t n, std::int64_t first_query,
               std::int64_t first_key);
/// [rows, n]: 1 at the largest of each row, else 0. No gradient.
Tensor one_hot_of_largest(const Tensor& x);
/// The blocks [rows, n] of the group's ranks side by side. Differentiable.
Tensor gather_columns(const Tensor& block, ProcessGroup& group);

/// q of q x q ranks, l of l x l x l.
int root_of(int ranks, double dims);
/// Piece i of n of the last dimension.
Tensor columns_of(const Tensor& x, int i, int n);

/// Whether `name` is one of the mlp's fc1.weight, fc2.weight and fc3.weight.
bool is_matrix(const std::string& name);
/// What rank r holds of `name`; {}: all of it.
using PartOf = std::function<Shards(const std::string& name, int r)>;
using Parts = std::map<std::string, Tensor>;
/// This rank's parts of the mlp's parameters, by name.
Parts take_parts(ProcessGroup& world, const PartOf& part_of);
Tensors values_of(const Parts& parts);
std::vector<NamedTensor> named(const Parts& parts);
/// Sums the gradients of the parameters that every rank has whole.
void sum_whole(const Parts& parts, ProcessGroup& world, const PartOf& part_of);

// --- What a rank returns -----------------------------------------------------------

/// Rank 0's weights are judged: the whole model, by name.
struct Result {
  double loss = 0;
  double bytes = 0, peak_bytes = 0;
  std::vector<NamedTensor> weights = {};
};
/// Reads this rank's ledger and memory. Messages from here on do not count:
/// they gather the weights.
Result count(ProcessGroup& world, double loss);
/// All named tensors of all ranks on rank 0, each once.
std::vector<NamedTensor> collect(ProcessGroup& world,
                                 const std::vector<NamedTensor>& own);
/// The whole tensors of which the ranks have parts.
std::vector<NamedTensor> join(const std::vector<NamedTensor>& parts,
                              ProcessGroup& world, const PartOf& part_of);
/// `count`, and then the whole tensors.
Result finish(ProcessGroup& world, double loss,
              const std::vector<NamedTensor>& parts, const PartOf& part_of);

// --- The comparison ------------------------------------------------------------------

using Train = std::function<Result(ProcessGroup& ranks)>;
/// The bytes that a rank sends in ten steps, by the lesson's formula.
using Bill = std::function<double(int rank, int ranks)>;
/// The run that a lesson must equal: by default chapter 00's.
using OneDevice = std::function<ReferenceRun()>;
OneDevice one_device(const std::string& model = kGpt);

struct Comparison {
  double loss = 0, one_device_loss = 0;
  double difference = 0;  ///< largest of all weights, relative to the largest
  std::vector<double> bytes, peak_bytes;  ///< by rank
};
/// Runs `train` on threads, and one device beside it.
Comparison run(int ranks, const Train& train,
               const OneDevice& alone = one_device());
/// The same, and prints it. Returns the exit status: 0 where the weights agree
/// to 1e-12, and the bytes exactly.
int compare(int ranks, const Train& train, const Bill& bill,
            const OneDevice& alone = one_device());

}  // namespace shardbook::lesson
