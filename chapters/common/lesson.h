#pragma once

// What the lessons share: a small model, its data, and the judge. Every lesson
// trains ten steps in f64, with SGD and without dropout.
//
//   lesson::Result train(ProcessGroup& dp);    // trains one rank
//   double bill(int rank, int ranks);          // the bytes that it sends
//   int main() { return lesson::compare({/*ranks=*/{4, 2}, train, bill}); }
//
// A lesson that another file includes has no main.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/run/training.h"
#include "chapters/common/sharded/parts.h"
#include "comm/process_group.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/inplace.h"
#include "core/ops.h"

namespace shardbook::lesson {

constexpr int kSteps = 10;
/// What the lessons train on. The judge chooses other sizes and seeds as well, so
/// no lesson types these numbers. The mlp is as wide as its vocabulary.
struct Task {
  int batch = 12, sequence = 12;  ///< samples per step, tokens per sample
  int vocabulary = 48, width = 24, heads = 12;
  std::uint64_t seed = 0;
};
/// Trains on another task from now on; {} is the one that lessons show. No rank
/// may be running.
void set_task(const Task& task);
const Task& task();
int batch_size();
int sequence();
int num_tokens();
/// Four blocks of width 24, twelve heads, 48 tokens.
std::string gpt();
/// An embedding and three linear layers: 48 -> 48 -> 192 -> 48 -> 48.
std::string mlp();
/// Their inputs and outputs.
std::vector<std::pair<double, double>> mlp_layers();

/// Chapter 00's options for ten steps of SGD on `model`.
Options options(const std::string& model = gpt());
ModelConfig config(const std::string& model = gpt());
/// SGD, because Adam would hide a gradient of the wrong scale.
std::unique_ptr<Optimizer> sgd(const Tensors& parameters);
/// Draws the same weights on every rank.
InitOptions init();
/// Makes layers without memory, for weights that come from other ranks.
InitOptions no_values();
/// Returns samples `rank`, rank + ranks, rank + 2 ranks, ... of a step's batch.
Batch batch(int step, int rank = 0, int ranks = 1);
/// Counts a tied parameter once.
double num_parameters(const std::string& model = gpt());
/// Add up or average the ranks' losses. Their message counts.
double sum_over(const Tensor& loss, ProcessGroup& group);
double mean_over(const Tensor& loss, ProcessGroup& group);
/// [n, n]: 1 where token first_query + i may see first_key + j, else 0.
Tensor visible(std::int64_t n, std::int64_t first_query,
               std::int64_t first_key);
/// [rows, n]: 1 at the largest element of each row, else 0. No gradient.
Tensor one_hot_of_largest(const Tensor& x);
/// Puts the ranks' blocks [rows, n] side by side. Differentiable.
Tensor gather_columns(const Tensor& block, ProcessGroup& group);
/// Cuts piece i of n out of the last dimension.
Tensor columns_of(const Tensor& x, int i, int n);
/// The number of ranks on each side of a square (dims 2) or a cube (3).
int root_of(int ranks, double dims);

// --- The mlp's parameters in parts: layout(name, r) is rank r's part, {} all -

using Parts = std::map<std::string, Tensor>;
/// Whether `name` is fc1.weight, fc2.weight or fc3.weight.
bool is_matrix(const std::string& name);
/// Cuts this rank's parts out of the whole model.
Parts take_parts(ProcessGroup& world, const ParameterLayout& layout);
Tensors values_of(const Parts& parts);
void clear_gradients(const Parts& parts);
/// Sums the gradients of the parameters that every rank has whole.
void sum_whole(const Parts& parts, ProcessGroup& world,
               const ParameterLayout& layout);

// --- What a rank returns -----------------------------------------------------

/// Rank 0 returns all weights of the model, by name; other ranks' do not count.
struct Result {
  double loss = 0, bytes = 0, peak_bytes = 0;
  std::vector<NamedTensor> weights = {};
  Result with(std::vector<NamedTensor> all) const {
    return {loss, bytes, peak_bytes, std::move(all)};
  }
};
/// Reads this rank's ledger and memory. Messages after it do not count: they
/// gather the weights, as in count(pp, loss).with(collect(pp, own)).
Result count(ProcessGroup& world, double loss);
/// Joins the parameters of gpt() that the ranks have whole, on all ranks.
std::vector<NamedTensor> collect(ProcessGroup& world,
                                 const std::vector<NamedTensor>& own);
/// Joins the parts of each tensor on rank 0.
std::vector<NamedTensor> join(const std::vector<NamedTensor>& parts,
                              const ParameterLayout& layout,
                              ProcessGroup& group);
/// Calls `count`, then joins the parts.
Result finish(ProcessGroup& world, double loss, const Parts& parts,
              const ParameterLayout& layout);

// --- The judge ---------------------------------------------------------------

struct Lesson {
  /// The number of ranks, and another one that is judged.
  std::vector<int> ranks = {1};
  std::function<Result(ProcessGroup&)> train;
  std::function<double(int rank, int ranks)> bill;
  /// The run that the lesson must equal: by default chapter 00's of gpt().
  std::function<ReferenceRun()> one_device = nullptr;
  /// The largest peak of a rank; 0 where memory is not judged.
  double peak_bytes = 0;
  /// The longest chain of messages of which each waits for the one before; 0
  /// where it is not judged.
  int chain = 0;
};
/// Trains the mlp on one device.
ReferenceRun mlp_on_one_device();

/// Whether the claims hold: it "ends", its "numbers" (weights and loss) equal one
/// device's to 1e-12, its "bytes" are the bill's, its "memory" is at most 1.05 of
/// the peak, its "waits" at most 1.1 of the chain. If so, whether the first three
/// hold for other "sizes" and seeds. Sends wait for their receivers.
struct Verdict {
  double loss = 0, one_device_loss = 0;
  std::string text;    ///< a line for each claim
  std::string failed;  ///< the claims that fail: "numbers bytes"
};
/// On `ranks` ranks without memory and other sizes; 0: all claims.
Verdict judge(const Lesson& lesson, int ranks = 0);
/// Prints the verdict and returns the program's exit status.
int compare(const Lesson& lesson);
/// Takes the place of a function in an exercise, and throws.
[[noreturn]] void write_this(const std::string& function);

}  // namespace shardbook::lesson
