#pragma once

// Everything that training changes, as one rank holds it: what a checkpoint
// keeps (checkpoints.h).
//
// A strategy names its parts: which elements of which parameter lie where, and
// which slot of the optimizer belongs to them. The same list serves for writing
// and for reading. A part may be cut out of the whole by dimensions (Shards), out
// of its flattened elements (begin), or both:
//
//   {"h.0.attn.c_attn.weight", {48, 144}, shards {{1, r, t, 3}}, values}
//   {"h.0.ln_1.weight", {48}, begin 12, values [12]}
//
// Random streams are keyed by seed, step and element, and the data by the step,
// so the number of steps is their position.

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "chapters/common/run/micro_batches.h"
#include "core/module.h"
#include "core/optim.h"
#include "core/shards.h"

namespace shardbook {

struct Options;
class DynamicLossScaler;

/// Elements [begin, begin + values.numel()) of a part of a parameter or buffer,
/// flattened. Ranks that name the same elements hold the same bits.
struct StatePart {
  std::string name;  ///< on one device
  Shape whole;       ///< on one device
  Shards shards;
  /// The rows that `shards` cut, if the whole has fewer (a padded embedding).
  /// 0: as many.
  std::int64_t padded_rows = 0;
  std::int64_t begin = 0;
  Tensor values;  ///< a view: loading writes to it
  /// Where the optimizer's state of these elements is; null for buffers.
  Optimizer* optimizer = nullptr;
  std::size_t slot = 0;
  std::int64_t slot_begin = 0;  ///< element of the slot's flat tensors
};

struct TrainingState {
  std::vector<StatePart> parts;
  /// Further numbers, the same on all ranks: a loss scale.
  std::map<std::string, double> numbers;
  /// The chapter's own options that a run must share with the one that it
  /// continues, and their values.
  std::map<std::string, std::string> agreed;
  /// Called with the numbers of a checkpoint when the parts have been loaded; may
  /// be empty. Collective.
  std::function<void(const std::map<std::string, double>& numbers)> loaded;
};

/// Adds tensors that this rank holds whole, with the optimizer's state for
/// those among its parameters.
void add_whole(TrainingState& state, const std::vector<NamedTensor>& tensors,
               Optimizer& optimizer);

/// Adds the numbers of a loss scale, and loads them before all else. The scaler
/// outlives the state.
void add_loss_scale(TrainingState& state, DynamicLossScaler& scaler);

/// Batch norm normalises by the images of one piece of the batch: where batches
/// are cut into other pieces, a run is another training and may not continue
/// this one. `first` is the first piece. Does nothing for language models.
void agree_on_images(TrainingState& state, const Options& options,
                     const MicroBatch& first);

/// One of a part's tensors: "parameter", "master", or a name of the optimizer's.
struct StateField {
  std::string name;
  Tensor values;  ///< a view of as many elements as the part has
};
std::vector<StateField> fields_of(const StatePart& part);
/// How often the optimizer has updated the part.
std::int64_t updates_of(const StatePart& part);
/// Creates the optimizer's state for the part, as its first update does.
void make_optimizer_state(const StatePart& part, std::int64_t updates);

/// Where elements [begin, begin + count) of a part lie in the flattened whole.
std::vector<IndexRun> flat_runs(const Shards& shards, const Shape& whole,
                                std::int64_t begin, std::int64_t count);

}  // namespace shardbook
