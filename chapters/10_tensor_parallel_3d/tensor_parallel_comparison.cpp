#include "chapters/10_tensor_parallel_3d/tensor_parallel_comparison.h"

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/08_tensor_parallel_2d/summa_layers.h"
#include "chapters/09_tensor_parallel_2p5d/tesseract.h"
#include "chapters/10_tensor_parallel_3d/cube_layers.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/worlds.h"
#include "comm/device_mesh.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "sim/virtual_clock.h"
#include "sim/world.h"

namespace shardbook::cube {

std::vector<Way> ways_for(int ranks) {
  std::vector<Way> ways = {{Kind::k1D, ranks, ranks, 1}};
  for (int side = ranks; side >= 2; --side) {
    if (ranks % (side * side) != 0) continue;
    const int depth = ranks / (side * side);
    ways.push_back({depth == 1 ? Kind::k2D : Kind::k2p5D, ranks, side, depth});
  }
  for (int side = 2; side <= ranks; ++side) {
    if (side * side * side == ranks) {
      ways.push_back({Kind::k3D, ranks, side, 1});
    }
  }
  return ways;
}

// --- One run -------------------------------------------------------------------

namespace {

Topology topology_of(const Way& way) {
  switch (way.kind) {
    case Kind::k1D:
      return Topology({"tp"}, {way.ranks});
    case Kind::k2D:
      return summa::square(way.side);
    case Kind::k2p5D:
      return tesseract::squares(way.side, way.depth);
    default:
      return cube_of(way.side);
  }
}

/// One rank's layers, and the number of parts of their input.
struct Cut {
  LayerFactory factory;
  std::int64_t row_parts = 1, column_parts = 1;
};

Cut cut_of(const Way& way, const ModelConfig& config, DeviceMesh& mesh) {
  switch (way.kind) {
    case Kind::k1D:
      return {tensor_parallel::layers(config, mesh.group("tp")), 1, 1};
    case Kind::k3D:
      return {layers(cube_on(mesh)), way.side * way.side, way.side};
    default:
      return {summa::layers(summa::grid_of(mesh)), way.depth * way.side,
              way.side};
  }
}

Cost cost_on_rank(const ComparedLayer& layer, const Way& way,
                  std::int64_t tokens, DType dtype, ProcessGroup& world) {
  ModelConfig config;
  config.n_embd = layer.h;
  config.n_head = layer.heads;
  DeviceMesh mesh(world, topology_of(way));
  const Cut cut = cut_of(way, config, mesh);
  SB_CHECK(layer.sequences % cut.row_parts == 0 &&
               tokens % layer.sequences == 0 && layer.h % cut.column_parts == 0,
           "comparison: ", tokens, " tokens in ", layer.sequences,
           " sequences of width ", layer.h, " do not divide over ",
           cut.row_parts, " x ", cut.column_parts, " parts");
  InitOptions init;
  init.dtype = dtype;
  std::unique_ptr<Module> module;
  if (layer.is_mlp) {
    module = std::make_unique<GptMlp>("h.0.mlp", config, init, cut.factory);
  } else {
    module = std::make_unique<GptBlock>("h.0", config, init, cut.factory);
  }
  const Tensor x =
      Tensor::empty({layer.sequences / cut.row_parts, tokens / layer.sequences,
                     layer.h / cut.column_parts},
                    {dtype, Device()});
  x.set_requires_grad();
  if (way.kind == Kind::k3D)
    (void)with_layout(x, Layout::kStraight);  // marks x

  Cost cost;
  const Device device = RankContext::current().device;
  const auto bytes_of = [&](MemoryKind kind) {
    return static_cast<double>(device.memory().current(kind));
  };
  cost.weight_bytes = bytes_of(MemoryKind::kParameter);
  const double before = bytes_of(MemoryKind::kActivation);
  sim::VirtualClock& clock = *sim::VirtualClock::current();
  world.clear_records();
  clock.begin_steps();
  const Tensor y = (*module)(x);
  // The input existed before; the output is not kept, but has the same size
  cost.kept_bytes = bytes_of(MemoryKind::kActivation) - before;
  autograd::backward({y}, {y.empty_like()});
  clock.end_step();
  cost.sent_bytes = world.sent_bytes();
  cost.time_s = clock.last_step_s();
  return cost;
}

}  // namespace

Comparison compare(const Options& options, const ComparedLayer& layer) {
  Options on_shapes = options;
  on_shapes.backend = "sim";
  on_shapes.device = "cpu";
  sim::WorldOptions world;
  world.launch = launch_options(on_shapes);
  world.cost = cost_model(on_shapes);
  world.fold_class = one_class;
  Comparison all{layer, options.cluster, options.dtype, {}};
  for (const int ranks : layer.ranks) {
    for (const Way& way : ways_for(ranks)) {
      Compared compared{way, {}};
      for (const double share : layer.tokens_over_h) {
        const std::int64_t tokens =
            std::llround(share * static_cast<double>(layer.h));
        Cost cost;
        sim::run_world(
            ranks,
            [&](ProcessGroup& group) {
              cost = cost_on_rank(layer, way, tokens, options.dtype, group);
            },
            world);
        compared.costs.push_back(cost);
      }
      all.ways.push_back(compared);
    }
  }
  return all;
}

// --- Where two ways are equal ----------------------------------------------------

namespace {

/// The bytes that a way sends: fixed + per_token * tokens.
struct Line {
  Way way;
  double fixed = 0, per_token = 0;
};

Line line_of(const ComparedLayer& layer, const Compared& compared) {
  const auto h = static_cast<double>(layer.h);
  const double few = layer.tokens_over_h.front() * h;
  const double many = layer.tokens_over_h.back() * h;
  const double bytes = compared.costs.front().sent_bytes;
  const double per_token =
      (compared.costs.back().sent_bytes - bytes) / (many - few);
  return {compared.way, bytes - per_token * few, per_token};
}

}  // namespace

std::vector<Lead> leads(const Comparison& all, int ranks) {
  std::vector<Line> lines;
  for (const Compared& compared : all.ways) {
    if (compared.way.ranks == ranks) {
      lines.push_back(line_of(all.layer, compared));
    }
  }
  SB_CHECK(!lines.empty(), "comparison: nothing was counted on ", ranks,
           " ranks");
  // Start from the lowest line; the first one to pass below it is next
  const Line* leader = &lines.front();
  for (const Line& line : lines) {
    if (line.fixed < leader->fixed) leader = &line;
  }
  std::vector<Lead> result = {{leader->way, 0}};
  while (true) {
    const Line* next = nullptr;
    double at = std::numeric_limits<double>::infinity();
    for (const Line& line : lines) {
      if (line.per_token >= leader->per_token) continue;
      const double crossing =
          (line.fixed - leader->fixed) / (leader->per_token - line.per_token);
      if (crossing < at) at = crossing, next = &line;
    }
    if (next == nullptr) return result;
    leader = next;
    result.push_back({leader->way, at});
  }
}

}  // namespace shardbook::cube
