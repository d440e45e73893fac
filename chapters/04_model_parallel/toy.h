#pragma once

// The smallest model that can be cut in two: a linear layer with ReLU, and
// another linear layer.

#include <memory>
#include <string>
#include <vector>

#include "chapters/common/pipeline/stages.h"
#include "chapters/common/run/options.h"

namespace shardbook::model_parallel {

/// [n, 10] -> Linear 10 -> 10 and ReLU ("net1") -> Linear 10 -> 5 ("net2").
std::unique_ptr<LayerList> toy_layers();

/// One way to train the toy.
struct ToyRun {
  std::string name;  ///< "one device", "naive", "splits of 6"
  std::vector<double> losses;
  /// Parameters, and the output after training.
  std::vector<NamedTensor> values;
  /// The largest difference to the run on one device.
  double largest_difference = 0;
};

/// Trains the toy on one device, naively on two, and in splits of `split_size`
/// of its 20 rows: the same random rows in each of --steps steps, the mean
/// squared error against random numbers.
std::vector<ToyRun> train_toy(const Options& options, std::int64_t split_size);
/// The device of each value, and one line per run.
std::string toy_text(const std::vector<ToyRun>& runs);
/// Trains the toy and prints the text; returns the exit status.
int show_toy(const Options& options, std::int64_t split_size);

}  // namespace shardbook::model_parallel
