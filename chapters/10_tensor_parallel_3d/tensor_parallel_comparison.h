#pragma once

// One layer in 1D, 2D, 2.5D and 3D on equally many ranks. Runs on shapes
// measure a rank's memory, traffic and time. They use no formula of the pages,
// so tests can compare the two.

#include <cstdint>
#include <string>
#include <vector>

#include "chapters/common/run/options.h"
#include "chapters/common/sharded/sharded_strategy.h"
#include "chapters/pictures/figure.h"

namespace shardbook::cube {

enum class Kind { k1D, k2D, k2p5D, k3D };

/// How ranks share a layer.
struct Way {
  Kind kind = Kind::k1D;
  int ranks = 1;
  int side = 1;   ///< of the square, or of the cube
  int depth = 1;  ///< squares, one above the other
};
/// "1D", "2.5D d=4".
std::string way_name(const Way& way);
/// All ways for a number of ranks; a square has at least four of them.
std::vector<Way> ways_for(int ranks);

/// The layer, and the sizes for which it is compared.
struct ComparedLayer {
  bool is_mlp = false;  ///< only the MLP of a transformer block
  std::int64_t h = 4096, heads = 64;
  std::int64_t sequences = 64;  ///< for any number of tokens
  std::vector<double> tokens_over_h = {0.25, 2, 16};
  std::vector<int> ranks = {4, 8, 16, 64};
};

/// Costs of one rank for one forward and backward.
struct Cost {
  double weight_bytes = 0;
  double kept_bytes = 0;  ///< for backward, the layer's input included
  double sent_bytes = 0;
  double time_s = 0;  ///< virtual
};

struct Compared {
  Way way;
  std::vector<Cost> costs;  ///< by number of tokens
};

struct Comparison {
  ComparedLayer layer;
  std::string cluster;
  DType dtype = DType::kF32;
  std::vector<Compared> ways;  ///< by number of ranks
};

/// Runs the layer in all ways, on shapes, in options.dtype on options.cluster.
/// Throws Error where the layer's sizes do not divide.
Comparison compare(const Options& options, const ComparedLayer& layer);

/// From `tokens` on, this way sends the least.
struct Lead {
  Way way;
  double tokens = 0;
};
/// The ways that send the least on `ranks` ranks, from few tokens to many.
/// Bytes are linear in the tokens, so the smallest and largest numbers of
/// tokens determine where two ways are equal.
std::vector<Lead> leads(const Comparison& all, int ranks);

/// A table, and the leads.
std::string comparison_text(const Comparison& all);
/// Bytes sent over the number of ranks, both logarithmic: a plot for each number
/// of tokens, a line for each kind. The depth of 2.5D is the best one.
pictures::Picture comparison_picture(const Comparison& all);

struct ProgramOptions {
  Passes passes;
  bool keep_gathered = true;
  std::string compared = "none";  ///< or "block", "mlp"
  std::string picture;            ///< of the comparison
};
void add_options(CommandLine& line, ProgramOptions& setup);

/// Prints the comparison of "block" or "mlp", and writes the plot to `picture`
/// unless that is empty. Returns the exit status.
int show_comparison(const Options& options, const std::string& layer,
                    const std::string& picture);

}  // namespace shardbook::cube
