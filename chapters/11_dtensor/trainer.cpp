#include "chapters/11_dtensor/trainer.h"

#include <algorithm>
#include <fstream>
#include <memory>
#include <numeric>

#include "chapters/11_dtensor/ops.h"
#include "chapters/11_dtensor/picture.h"
#include "chapters/11_dtensor/recipes.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::dtensor {
namespace {

// The styles of the blocks' layers, by the last part of their names.
const Style* style_of(const std::string& name) {
  static const Style packed = colwise(3), column = colwise(), row = rowwise();
  if (name.ends_with("c_attn")) return &packed;
  if (name.ends_with("c_fc")) return &column;
  return name.ends_with("c_proj") ? &row : nullptr;
}

// Where a rank's part of a parameter lies: tp cuts first, dp cuts tp's part.
Shards shards_of(const std::string& name, const Topology& grid, int rank,
                 bool is_fsdp) {
  Shards shards;
  const int t = grid.size("tp"), d = grid.size("dp");
  const std::size_t dot = name.rfind('.');
  const Style* style = style_of(name.substr(0, dot));
  const bool is_bias = name.substr(dot + 1) == "bias";
  if (t > 1 && style != nullptr) {
    const bool is_column = style->kind == Style::Kind::kColwise;
    if (is_column || !is_bias) {
      shards.push_back({is_column && !is_bias ? 1 : 0,
                        grid.coordinate(rank, "tp"), t, style->blocks});
    }
  }
  if (d > 1 && is_fsdp) {
    shards.push_back({0, grid.coordinate(rank, "dp"), d, 1});
  }
  return shards;
}

void check_sizes(const Options& options, const TrainerOptions& how,
                 const Topology& grid, const ModelConfig& config) {
  const std::int64_t t = grid.size("tp"), d = grid.size("dp");
  SB_CHECK(how.data_parallel == "ddp" || how.data_parallel == "fsdp",
           "--data-parallel ", how.data_parallel, ": give ddp or fsdp");
  SB_CHECK(config.n_head % t == 0, "--mesh: ", config.n_head,
           " heads do not divide over tp=", t, "; give a tp that divides them");
  SB_CHECK(options.batch % (d * how.micro_batches) == 0, "--batch ",
           options.batch, ": dp=", d, " times --micro-batches ",
           how.micro_batches, " does not divide it");
  if (how.data_parallel != "fsdp") return;
  SB_CHECK(config.vocab_size % d == 0, "--data-parallel fsdp: the ",
           config.vocab_size, " rows of ", options.model,
           "'s vocabulary do not divide over dp=", d,
           "; give --data-parallel ddp, or a model with a vocab_size of ",
           padded_vocabulary(config.vocab_size, d));
  for (const std::int64_t rows : {config.n_embd / t, config.n_positions}) {
    SB_CHECK(rows % d == 0, "--data-parallel fsdp: a parameter with ", rows,
             " rows does not divide over dp=", d,
             "; give --data-parallel ddp, or a dp that divides ",
             std::gcd(config.n_embd / t, config.n_positions));
  }
}

Placement placement_of(const TrainerOptions& how) {
  return how.data_parallel == "fsdp" ? shard(0) : replicate();
}

// dp's rows of a batch that every rank has whole.
DTensor own_rows(const Tensor& whole, const Mesh& dp) {
  return cut_tensor(whole, dp, {shard(0)});
}

ShardedModel sharded_model(const TrainerOptions& how, DeviceMesh& devices) {
  const Mesh dp(devices, {"dp"}), tp(devices, {"tp"});
  const Topology grid = devices.topology();
  const bool is_fsdp = how.data_parallel == "fsdp";
  const Placement placement = placement_of(how);
  const int rank = devices.world().rank();
  ShardedModel model;
  model.layout = [grid, is_fsdp](const std::string& name, int rank) {
    return shards_of(name, grid, rank, is_fsdp);
  };
  const auto part_of = [layout = model.layout, rank](const std::string& name,
                                                     InitOptions init) {
    init.shards = layout(name, rank);
    return init;
  };
  const auto lend =
      [dp, placement](
          Module& module,
          const std::function<void(Module&)>& inside = [](Module&) {}) {
        lend_parameters(module, dp, placement, inside);
      };
  const LayerFactory one_device;
  LayerFactory& layers = model.layers;

  layers.linear = [=](const std::string& name, std::int64_t in,
                      std::int64_t out, double stddev,
                      const InitOptions& init) -> AnyModule {
    auto made = std::make_unique<Linear>();
    made->weight = shardbook::make_parameter(
        name + ".weight", {in, out}, stddev, part_of(name + ".weight", init));
    made->bias =
        make_constant_parameter({out}, 0, part_of(name + ".bias", init));
    lend(*made, [&](Module& module) {
      add_layout_hooks(module, tp, *style_of(name), in, out);
    });
    return {std::move(made)};
  };
  layers.embedding = [=](const std::string& name, std::int64_t rows,
                         std::int64_t width, double stddev,
                         const InitOptions& init) -> AnyModule {
    AnyModule made = one_device.embedding(name, rows, width, stddev,
                                          part_of(name + ".weight", init));
    // This rank's samples; dropout counts rows of the whole batch
    (*made).add_forward_pre_hook([dp](Module&, Tensors& tokens) {
      const std::int64_t rows = tokens[0].size(0);
      tokens[0] = own_rows(tokens[0], dp).local();
      BatchSlice& batch = RankContext::current().random.batch;
      batch.first += batch.stride *
                     ceil_part(rows, dp.shape()[0], dp.coordinate()[0]).offset;
    });
    lend(*made);
    return made;
  };
  layers.position_embedding = [=](const std::string& name, std::int64_t rows,
                                  std::int64_t width, double stddev,
                                  const InitOptions& init) {
    return one_device.position_embedding(name, rows, width, stddev,
                                         part_of(name + ".weight", init));
  };
  layers.positions = [=](AnyModule& wpe, const Tensor& tokens) {
    return slice(borrowed(wpe.as<Embedding>().weight, dp, placement), 0, 0,
                 tokens.size(-1));
  };
  layers.layer_norm = [=](const std::string& name, std::int64_t width,
                          double eps, const InitOptions& init) {
    AnyModule made = one_device.layer_norm(name, width, eps,
                                           part_of(name + ".weight", init));
    lend(*made);
    return made;
  };
  layers.attention = [tp](const Tensor& qkv, AttentionOptions options) {
    const std::int64_t t = tp.shape()[0], heads = options.heads;
    options.heads = heads / t;
    options.shard = {{qkv.size(0), heads, qkv.size(1), qkv.size(1)},
                     {0, options.heads * tp.coordinate()[0], 0, 0},
                     {}};
    return shardbook::attention(qkv, options);
  };
  layers.logits = [=](const Tensor& x, AnyModule& wte) {
    const Tensor weight = borrowed(wte.as<Embedding>().weight, dp, placement);
    const Tensor rows = shardbook::reshape(x, {-1, weight.size(1)});
    return shardbook::reshape(shardbook::matmul(rows, weight, false, true),
                              {x.size(0), x.size(1), weight.size(0)});
  };
  layers.loss = [dp](const Tensor& logits, const Tensor& targets) {
    return cross_entropy(from_local(logits, dp, {shard(0)}),
                         own_rows(targets, dp))
        .full_tensor();
  };
  return model;
}

Options checked(const Options& options, const TrainerOptions& how,
                const DeviceMesh& devices) {
  const ModelConfig config = model_config(options);
  // ShardedTrainer refuses other models
  if (config.type == "gpt2") {
    check_sizes(options, how, devices.topology(), config);
  }
  return options;
}

}  // namespace

Topology topology_of(const TrainerOptions& how, int world_size) {
  std::vector<int> sizes(1, 0);
  for (const char c : how.mesh) {
    if (c == 'x') {
      sizes.push_back(0);
    } else {
      SB_CHECK(c >= '0' && c <= '9' && sizes.back() < 100000, "--mesh ",
               how.mesh, ": give DPxTP, such as 2x4, or TP");
      sizes.back() = 10 * sizes.back() + (c - '0');
    }
  }
  if (how.mesh.empty()) sizes = {world_size};
  if (sizes.size() == 1) sizes.insert(sizes.begin(), 1);
  SB_CHECK(sizes.size() == 2 && sizes[0] > 0 && sizes[1] > 0 &&
               sizes[0] * sizes[1] == world_size,
           "--mesh ", how.mesh, ": give DPxTP with a product of ", world_size,
           ", the world size");
  return Topology({"dp", "tp"}, sizes);
}

Trainer::Trainer(const Options& options, const TrainerOptions& how,
                 DeviceMesh& devices)
    : ShardedTrainer(checked(options, how, devices),
                     sharded_model(how, devices), devices.world(),
                     how.micro_batches),
      how_(how),
      devices_(devices),
      d_(devices.size("dp")),
      t_(devices.size("tp")) {}

std::string Trainer::remarks() {
  if (devices_.world().rank() != 0) return "";
  const Topology& grid = devices_.topology();
  const auto h = config().n_embd;
  const std::vector<std::pair<std::string, Shape>> shown = {
      {"wte.weight", {config().vocab_size, h}},
      {"h.*.ln_1.weight", {h}},
      {"h.*.attn.c_attn.weight", {h, 3 * h}},
      {"h.*.attn.c_proj.weight", {h, h}},
      {"h.*.mlp.c_fc.weight", {h, 4 * h}},
      {"h.*.mlp.c_proj.weight", {4 * h, h}}};
  std::vector<Held> rows;
  for (const auto& [name, shape] : shown) {
    const std::string& parameter = name;
    rows.push_back(held_by(name, shape, grid.world_size(), [&](int rank) {
      return shards_of(parameter, grid, rank, how_.data_parallel == "fsdp");
    }));
  }
  if (!how_.picture.empty()) {
    std::ofstream file(how_.picture);
    file << picture_svg(rows);
    SB_CHECK(file.good(), "--picture ", how_.picture, ": cannot be written");
  }
  return "Ranks that hold each block, on " + grid.text() + ":\n" +
         picture_text(rows) + "\n";
}

}  // namespace shardbook::dtensor
