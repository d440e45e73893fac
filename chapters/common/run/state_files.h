#pragma once

// The files of one checkpoint: every rank writes one, any number of ranks reads
// them.
//
//   rank-00001-of-00004.safetensors    "exp_avg:h.0.ln_1.weight", ... of rank 0
//   rank-00002-of-00004.safetensors    ...
//
// A tensor is a piece of one field of one parameter. The metadata say which:
// the shape of the whole, how the piece is cut out of it, how often the
// optimizer has updated it, and a sum over its bytes. A piece that several
// ranks hold is written by one of them, in turn.

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/run/training_state.h"
#include "comm/process_group.h"
#include "core/safetensors.h"

namespace shardbook {

/// Writes this rank's file into `folder`. `world` is null where there is one
/// rank. Collective.
void write_state_file(const std::string& folder, const TrainingState& state,
                      ProcessGroup* world);

/// The files of all ranks that wrote. They are mapped: a rank reads the pages of
/// the pieces that it needs.
class StateFiles {
 public:
  /// Throws Error that names the file which is missing, damaged, or of another
  /// checkpoint.
  StateFiles(const std::string& folder, int num_ranks);

  /// All parameters and buffers in the files.
  std::vector<std::string> names() const;
  /// Throws Error where the files lack elements of `state`, have a field of a
  /// parameter that it lacks, or hold other shapes or dtypes. `with_optimizer`
  /// false: checks parameters and buffers only.
  void check(const TrainingState& state, bool with_optimizer) const;
  /// Fills the parts of a state that has been checked, whatever mesh wrote the
  /// files. Creates the optimizer's state.
  void load(const TrainingState& state, bool with_optimizer) const;

 private:
  struct Piece {
    StatePart place;  ///< its `whole`, `shards`, `padded_rows` and `begin`
    std::int64_t count = 0;
    std::int64_t updates = 0;
    std::string sum;
    std::size_t file = 0;
    SafetensorsEntry entry;
  };
  using Pieces = std::vector<Piece>;

  void add(std::size_t file, const SafetensorsEntry& entry);
  std::int64_t updates(const std::string& name) const;
  const Pieces& pieces(const std::string& name, const std::string& field) const;
  const void* bytes(const Piece& piece) const;
  Tensor assemble(const StatePart& part, const StateField& field) const;

  std::string folder_;
  std::vector<SafetensorsFile> files_;
  /// By name and field.
  std::map<std::pair<std::string, std::string>, Pieces> pieces_;
};

}  // namespace shardbook
