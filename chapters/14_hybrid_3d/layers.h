#pragma once

// The layers of one rank: columns and rows of the tensor-parallel chapter, the
// tokens of the sequence-parallel chapter, or both, in one list that a pipeline
// cuts into stages.

#include <memory>

#include "chapters/14_hybrid_3d/degrees.h"
#include "chapters/common/pipeline/stages.h"
#include "chapters/common/sharded/parts.h"
#include "comm/shape_group.h"

namespace shardbook::hybrid {

struct RankLayers {
  LayerFactory factory;
  /// The same, for runs on shapes: their messages reach nobody.
  LayerFactory on_shapes;
  std::shared_ptr<const LayerList> list;
  /// The model's sizes; the vocabulary with its padding.
  ModelConfig padded;
  /// Parts over the tp group.
  ParameterLayout layout;
  std::shared_ptr<ShapeGroup> tp_shapes, cp_shapes;
};

/// `tp` and `cp` outlive the layers. Collective over both.
RankLayers rank_layers(const Options& options, const HybridOptions& how,
                       ProcessGroup& tp, ProcessGroup& cp);

}  // namespace shardbook::hybrid
