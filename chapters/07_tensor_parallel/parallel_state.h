#pragma once

// The process groups of Megatron-LM: every rank has a place on the axes tensor
// (t), data (d) and pipeline (p), W = t d p, and belongs to a group along each.
//
//   W = 16, t = 2, p = 4          data 0         data 1
//   stage 0                       0  1           2  3
//   stage 1                       4  5           6  7
//   stage 2                       8  9          10 11
//   stage 3                      12 13          14 15
//
//   tensor      [0,1] [2,3] ..              rows of a column
//   data        [0,2] [1,3] [4,6] ..        the same place in every column
//   pipeline    [0,4,8,12] [1,5,9,13] ..    from top to bottom
//   model       [0,1,4,5,8,9,12,13] ..      a column: one replica of the model
//   embedding   [0,12] [1,13] ..            ranks with the token embedding
//   position    [0] [1] ..                  ranks with the position table
//
// An encoder and decoder model has stages of the encoder, below `split_rank`, and
// of the decoder, which begins with embeddings of its own.
// Narayanan et al. 2021, section 2; Megatron-LM: core/parallel_state.py.

#include <memory>
#include <vector>

#include "comm/device_mesh.h"

namespace shardbook::tensor_parallel {

struct ModelParallelSizes {
  int t = 1;  ///< tensor-parallel ranks
  int p = 1;  ///< stages
  int v = 1;  ///< virtual stages on each rank; more than 1 needs p > 1
  /// The decoder's first stage, 1 to p - 1; -1: the model has no encoder.
  int split_rank = -1;
};

/// Axes pp, dp, cp (of one) and tp over `world_size` ranks. Throws Error, with
/// sizes that work, if they do not fit together.
Topology model_parallel_topology(int world_size,
                                 const ModelParallelSizes& sizes);

/// The ranks of `pipeline` (by stage) that hold the token embedding or its copy
/// at the output: the first, the last, and the decoder's first stage.
std::vector<int> embedding_ranks(const std::vector<int>& pipeline,
                                 int split_rank = -1);
/// Holders of the position table: the first and the decoder's first stage.
std::vector<int> position_embedding_ranks(const std::vector<int>& pipeline,
                                          int split_rank = -1);

/// One rank's groups.
class ModelParallel {
 public:
  /// `world` must outlive it. Collective.
  ModelParallel(ProcessGroup& world, const ModelParallelSizes& sizes);
  /// The same on a topology with axes tp and pp, in any order and among others.
  ModelParallel(ProcessGroup& world, const Topology& topology, int v = 1,
                int split_rank = -1);

  ProcessGroup& tensor() { return mesh_.group("tp"); }
  ProcessGroup& pipeline() { return mesh_.group("pp"); }
  ProcessGroup& data() { return mesh_.group("dp"); }
  /// t p ranks: one replica of the model.
  ProcessGroup& model() { return mesh_.group("tp-pp"); }
  /// Null on stages outside the group.
  ProcessGroup* embedding() { return embedding_.get(); }
  ProcessGroup* position_embedding() { return position_embedding_.get(); }
  DeviceMesh& mesh() { return mesh_; }

  int stage() const { return mesh_.coordinate("pp"); }
  /// Chunk i of v on this rank is virtual stage i p + stage(): the model's first
  /// layers are in chunk 0 of the first stage, its last in chunk v - 1 of the
  /// last.
  int virtual_stage(int chunk) const { return chunk * sizes_.p + stage(); }
  bool is_first(int chunk = 0) const { return virtual_stage(chunk) == 0; }
  bool is_last(int chunk) const {
    return virtual_stage(chunk) == sizes_.v * sizes_.p - 1;
  }
  /// True on every stage of a model without encoder.
  bool is_decoder() const { return stage() >= sizes_.split_rank; }

 private:
  const ModelParallelSizes sizes_;
  DeviceMesh mesh_;
  std::shared_ptr<ProcessGroup> embedding_, position_embedding_;
};

/// Megatron-LM's name for the constructor.
inline std::unique_ptr<ModelParallel> initialize_model_parallel(
    ProcessGroup& world, int t, int p, int v = 1, int split_rank = -1) {
  return std::make_unique<ModelParallel>(
      world, ModelParallelSizes{t, p, v, split_rank});
}

}  // namespace shardbook::tensor_parallel
