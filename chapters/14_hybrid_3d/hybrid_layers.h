#pragma once

// The layers of one rank: columns and rows of the tensor-parallel chapter, the
// tokens of the sequence-parallel chapter, experts, or all of them, in one list
// that a pipeline cuts into stages. A ResNet's layers are whole.

#include <memory>

#include "chapters/14_hybrid_3d/degrees.h"
#include "chapters/common/pipeline/stages.h"
#include "chapters/common/sharded/parts.h"
#include "comm/device_mesh.h"
#include "comm/shape_group.h"

namespace shardbook::hybrid {

/// The groups of one rank; the mesh owns them.
struct Groups {
  ProcessGroup& data;  ///< dp x cp: the same parameters, other tokens
  ProcessGroup& tp;
  ProcessGroup& cp;
  ProcessGroup& pp;
  ProcessGroup* ep = nullptr;  ///< other experts, other tokens; null: none
  /// The same parameters, experts included: edp x cp.
  ProcessGroup& copies;
  /// The same experts: copies, and tp where it cuts their slots.
  ProcessGroup& experts;
  /// Other parts of the stage's parameters: tp x ep.
  ProcessGroup& parts;
};
/// Collective over the mesh's world.
Groups groups_of(DeviceMesh& mesh, const HybridOptions& setup);

/// How the ranks of tp have a parameter.
struct OverTp {
  /// Whether each rank of tp holds the parameter whole, with a gradient that is
  /// the same on all of them, or a part of a sum over them.
  std::function<bool(const std::string& name)> is_whole;
  /// Whether it is a part: of norms, biases and routers on cut tokens, and of
  /// norms over heads, of which each rank has its own.
  std::function<bool(const std::string& name)> is_partial;
};
OverTp over_tp(const ModelConfig& config, const HybridOptions& setup);

struct RankLayers : OverTp {
  LayerFactory factory;
  std::shared_ptr<const LayerList> list;
  /// The model's sizes; the vocabulary with its padding.
  ModelConfig padded;
  /// By the rank in `Groups::parts`.
  ParameterLayout layout;
  /// Layers of experts report here, and read the scale of their losses.
  std::shared_ptr<moe::MoeRecord> record;
  std::shared_ptr<ShapeGroup> tp_shapes, cp_shapes, ep_shapes;
};

/// Of samples of `seq` tokens. `groups` outlive the layers. Collective over tp, cp
/// and ep.
RankLayers rank_layers(const ModelConfig& config, std::int64_t seq,
                       const HybridOptions& setup, const Groups& groups);

/// Layers of one device that routes the tokens of each context-parallel rank by
/// themselves.
LayerFactory reference_layers(const HybridOptions& setup,
                              std::shared_ptr<moe::MoeRecord> record);

}  // namespace shardbook::hybrid
