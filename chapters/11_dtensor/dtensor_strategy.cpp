#include "chapters/11_dtensor/dtensor_strategy.h"

#include <algorithm>
#include <map>
#include <memory>

#include "chapters/11_dtensor/dtensor_ops.h"
#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/11_dtensor/recipes.h"
#include "core/check.h"
#include "core/context.h"
#include "core/text_file.h"

namespace shardbook::dtensor {
namespace {

// The styles of a GPT's and an MLP's layers, by the last part of their names.
const Style* style_of(const std::string& name) {
  static const Style packed = colwise(3), column = colwise(), row = rowwise();
  if (name.ends_with("c_attn")) return &packed;
  if (name.ends_with("c_fc") || name == "fc1") return &column;
  return name.ends_with("c_proj") || name == "fc2" ? &row : nullptr;
}

// The shape of a parameter on one device.
Shape whole_of(const std::string& name, const ModelConfig& config) {
  const std::int64_t h = config.n_embd;
  if (name.ends_with("wte.weight")) return {config.vocab_size, h};
  if (name.ends_with("wpe.weight")) return {config.n_positions, h};
  const auto has = [&name](const char* part) {
    return name.find(part) != std::string::npos;
  };
  const std::int64_t out = has("c_attn")               ? 3 * h
                           : has("c_fc") || has("fc1") ? 4 * h
                           : has("fc3")                ? config.vocab_size
                                                       : h;
  if (name.ends_with("bias") || has("ln_")) return {out};
  return {has("mlp.c_proj") || has("fc2") ? 4 * h : h, out};
}

// How tp cuts a parameter.
Shards cuts_of_tp(const std::string& name, const Topology& grid, int rank) {
  const int t = grid.size("tp");
  const std::size_t dot = name.rfind('.');
  const Style* style = style_of(name.substr(0, dot));
  const bool is_bias = name.substr(dot + 1) == "bias";
  if (t == 1 || style == nullptr) return {};
  const bool is_column = style->kind == Style::Kind::kColwise;
  if (!is_column && is_bias) return {};
  return {{is_column && !is_bias ? 1 : 0, grid.coordinate(rank, "tp"), t,
           style->blocks}};
}

// The part of a parameter on each rank of tp.
Shape shape_on_tp(const std::string& name, const Topology& grid,
                  const ModelConfig& config) {
  return shape_of(cuts_of_tp(name, grid, 0), whole_of(name, config));
}

// Where a rank's part of a parameter lies: tp cuts first, and dp cuts the rows of
// tp's part, which it need not divide.
Shards shards_of(const std::string& name, const Topology& grid, int rank,
                 const ModelConfig& config, bool is_fsdp) {
  Shards shards = cuts_of_tp(name, grid, rank);
  const int d = grid.size("dp");
  if (d > 1 && is_fsdp) {
    shards.push_back({0, grid.coordinate(rank, "dp"), d, 1,
                      shape_on_tp(name, grid, config)[0]});
  }
  return shards;
}

void check_sizes(const Options& options, const StrategyOptions& setup,
                 const Topology& grid, const ModelConfig& config) {
  const std::int64_t t = grid.size("tp"), d = grid.size("dp");
  SB_CHECK(setup.data_parallel == "ddp" || setup.data_parallel == "fsdp",
           "--data-parallel ", setup.data_parallel, ": give ddp or fsdp");
  const bool is_mlp = config.type == "mlp";
  const std::int64_t parts = is_mlp ? 4 * config.n_embd : config.n_head;
  SB_CHECK(parts % t == 0, "--mesh: ", parts,
           is_mlp ? " hidden units" : " heads", " do not divide over tp=", t,
           "; give a tp that divides them");
  SB_CHECK(options.batch % (d * setup.micro_batches) == 0, "--batch ",
           options.batch, ": dp=", d, " times --micro-batches ",
           setup.micro_batches, " does not divide it");
}

ModelConfig config_of(const ModelOptions& options) {
  const ModelConfig config = model_config(options);
  SB_CHECK(
      !config.is_image(), "--model ", options.model,
      ": this chapter shards a GPT or the mlp; give mlp, gpt-nano, gpt2 or "
      "another one of its family");
  return config;
}

Placement placement_of(const StrategyOptions& setup) {
  return setup.data_parallel == "fsdp" ? shard(0) : replicate();
}

// dp's rows of a batch that every rank has whole.
DTensor own_rows(const Tensor& whole, const Mesh& dp) {
  return cut_tensor(whole, dp, {shard(0)});
}

ShardedModel sharded_model(const StrategyOptions& setup, DeviceMesh& devices,
                           const ModelConfig& config) {
  const Mesh dp(devices, {"dp"}), tp(devices, {"tp"});
  const Topology grid = devices.topology();
  const bool is_fsdp = setup.data_parallel == "fsdp";
  const Placement placement = placement_of(setup);
  const int rank = devices.world().rank();
  ShardedModel model;
  model.layout = [=](const std::string& name, int rank) {
    return shards_of(name, grid, rank, config, is_fsdp);
  };
  const auto part_of = [layout = model.layout, rank](const std::string& name,
                                                     InitOptions init) {
    init.shards = layout(name, rank);
    return init;
  };
  const auto lend =
      [=](
          const std::string& name, Module& module,
          const std::function<void(Module&)>& inside = [](Module&) {}) {
        std::vector<Shape> whole;
        for (const NamedTensor& each : module.named_parameters()) {
          whole.push_back(shape_on_tp(name + "." + each.name, grid, config));
        }
        lend_parameters(module, dp, placement, whole, inside);
      };
  // This rank's samples; dropout counts rows of the whole batch
  const auto read_own_rows = [dp](Module&, Tensors& tokens) {
    const std::int64_t rows = tokens[0].size(0);
    tokens[0] = own_rows(tokens[0], dp).local();
    BatchSlice& batch = RankContext::current().random.batch;
    batch.first += batch.stride *
                   ceil_part(rows, dp.shape()[0], dp.coordinate()[0]).offset;
  };
  if (config.type == "mlp") {
    model.make = [=, layout = model.layout](const ModelConfig& config,
                                            const InitOptions& init) {
      auto mlp = std::make_unique<MlpModel>(config, init);
      mlp->replace_tensors([&](const std::string& name, const Tensor& whole) {
        const MemoryScope kind(MemoryKind::kParameter);
        return take_part(whole.detach(), layout(name, rank))
            .set_requires_grad();
      });
      mlp->wte.add_forward_pre_hook(read_own_rows);
      for (const NamedModule& layer : mlp->named_modules()) {
        if (layer.name.empty()) continue;
        const std::string name = layer.name;
        lend(name, *layer.module, [&](Module& module) {
          const Style* style = style_of(name);
          if (style == nullptr) return;
          const Shape whole = whole_of(name + ".weight", config);
          add_layout_hooks(module, tp, *style, whole[0], whole[1]);
        });
      }
      return mlp;
    };
  }
  const LayerFactory one_device;
  LayerFactory& layers = model.layers;

  layers.linear = [=](const std::string& name, const BlockPart& part,
                      const InitOptions& init) -> AnyModule {
    auto made = std::make_unique<Linear>();
    made->weight =
        shardbook::make_parameter(name + ".weight", {part.in, part.out},
                                  part.stddev, part_of(name + ".weight", init));
    made->bias =
        make_constant_parameter({part.out}, 0, part_of(name + ".bias", init));
    lend(name, *made, [&](Module& module) {
      add_layout_hooks(module, tp, *style_of(name), part.in, part.out);
    });
    return {std::move(made)};
  };
  layers.embedding = [=](const std::string& name, std::int64_t rows,
                         std::int64_t width, double stddev,
                         const InitOptions& init) -> AnyModule {
    AnyModule made = one_device.embedding(name, rows, width, stddev,
                                          part_of(name + ".weight", init));
    (*made).add_forward_pre_hook(read_own_rows);
    lend(name, *made);
    return made;
  };
  layers.position_embedding = [=](const std::string& name, std::int64_t rows,
                                  std::int64_t width, double stddev,
                                  const InitOptions& init) {
    return one_device.position_embedding(name, rows, width, stddev,
                                         part_of(name + ".weight", init));
  };
  layers.positions = [=](AnyModule& wpe, const Tensor& tokens) {
    const Tensor weight = borrowed(wpe.as<Embedding>().weight, dp, placement,
                                   whole_of("wpe.weight", config));
    return slice(weight, 0, 0, tokens.size(-1));
  };
  layers.norm = [=](const std::string& name, const BlockPart& part, double eps,
                    const InitOptions& init) {
    AnyModule made =
        one_device.norm(name, part, eps, part_of(name + ".weight", init));
    lend(name, *made);
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
    const Tensor weight = borrowed(wte.as<Embedding>().weight, dp, placement,
                                   whole_of("wte.weight", config));
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

Options checked(const Options& options, const StrategyOptions& setup,
                const DeviceMesh& devices) {
  const ModelConfig config = model_config(options);
  // config_of refuses other models
  if (!config.is_image()) {
    check_sizes(options, setup, devices.topology(), config);
  }
  return options;
}

}  // namespace

void add_options(CommandLine& line, StrategyOptions& setup) {
  line.add("--mesh", &setup.mesh,
           "ranks as DPxTP, such as 2x2; TP alone: tensor parallelism")
      .may_differ(may_differ::kRanks);
  line.add("--data-parallel", &setup.data_parallel,
           "what dp does with parameters: shards or replicas", {"fsdp", "ddp"})
      .may_differ(may_differ::kPlace);
  line.add("--micro-batches", &setup.micro_batches, "micro-batches per step", 1)
      .may_differ(may_differ::kSums);
  line.add("--picture", &setup.picture,
           "a file for the picture of who holds which block, as SVG")
      .may_differ(may_differ::kOutput);
  line.refuse("--accumulate", "this option is called --micro-batches");
}

Topology topology_of(const StrategyOptions& setup, int world_size) {
  std::vector<int> sizes(1, 0);
  for (const char c : setup.mesh) {
    if (c == 'x') {
      sizes.push_back(0);
    } else {
      SB_CHECK(c >= '0' && c <= '9' && sizes.back() < 100000, "--mesh ",
               setup.mesh, ": give DPxTP, such as 2x4, or TP");
      sizes.back() = 10 * sizes.back() + (c - '0');
    }
  }
  if (setup.mesh.empty()) sizes = {world_size};
  if (sizes.size() == 1) sizes.insert(sizes.begin(), 1);
  SB_CHECK(sizes.size() == 2 && sizes[0] > 0 && sizes[1] > 0 &&
               sizes[0] * sizes[1] == world_size,
           "--mesh ", setup.mesh, ": give DPxTP with a product of ", world_size,
           ", the world size");
  return Topology({"dp", "tp"}, sizes);
}

namespace {

// One parameter of each number of rows.
std::vector<std::string> kinds_of_rows(const ModelConfig& config) {
  if (config.type == "mlp") {
    return {"wte.weight", "fc1.weight", "fc1.bias", "fc2.weight"};
  }
  return {"wte.weight", "wpe.weight",         "ln_f.weight",      "c_attn.bias",
          "c_fc.bias",  "attn.c_proj.weight", "mlp.c_proj.weight"};
}

// One parameter of each layout.
std::vector<std::string> kinds_of_layouts(const ModelConfig& config) {
  if (config.type == "mlp") {
    return {"wte.weight", "fc1.weight", "fc2.weight", "fc3.weight"};
  }
  return {"wte.weight",
          "h.*.ln_1.weight",
          "h.*.attn.c_attn.weight",
          "h.*.attn.c_proj.weight",
          "h.*.mlp.c_fc.weight",
          "h.*.mlp.c_proj.weight"};
}

}  // namespace

// Rows that dp does not divide give the last ranks smaller parts.
FoldClass fold_class(const Options& options, const StrategyOptions& setup) {
  if (setup.data_parallel != "fsdp") return one_class;
  const Topology grid = topology_of(setup, options.world_size);
  const ModelConfig config = config_of(options);
  check_sizes(options, setup, grid, config);
  const int d = grid.size("dp");
  std::map<std::vector<std::int64_t>, int> classes;
  std::vector<int> class_of;
  for (int r = 0; r < d; ++r) {
    std::vector<std::int64_t> sizes;
    for (const std::string& name : kinds_of_rows(config)) {
      const std::int64_t rows = shape_on_tp(name, grid, config)[0];
      sizes.push_back(ceil_part(rows, d, r).size);
    }
    const auto next = static_cast<int>(classes.size());
    class_of.push_back(classes.emplace(sizes, next).first->second);
  }
  return [class_of, grid](int rank) {
    return class_of[static_cast<std::size_t>(grid.coordinate(rank, "dp"))];
  };
}

DTensorStrategy::DTensorStrategy(const Options& options,
                                 const StrategyOptions& setup,
                                 DeviceMesh& devices)
    : ShardedStrategy(checked(options, setup, devices),
                      sharded_model(setup, devices, config_of(options)),
                      devices.world(), {setup.micro_batches}),
      setup_(setup),
      devices_(devices),
      d_(devices.size("dp")),
      t_(devices.size("tp")) {}

std::string DTensorStrategy::remarks() {
  if (devices_.world().rank() != 0) return "";
  const Topology& grid = devices_.topology();
  std::vector<Held> rows;
  for (const std::string& name : kinds_of_layouts(config())) {
    rows.push_back(held_by(name, whole_of(name, config()), grid.world_size(),
                           [&](int rank) {
                             return shards_of(name, grid, rank, config(),
                                              setup_.data_parallel == "fsdp");
                           }));
  }
  const std::string title = "Ranks that hold each block, on " + grid.text();
  if (!setup_.picture.empty()) {
    write_text_file(setup_.picture, picture_svg(title, rows),
                    "--picture " + setup_.picture + ": this file");
  }
  return title + ":\n" + picture_text(rows) + "\n";
}

}  // namespace shardbook::dtensor
