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

// Whether `module` ends in this name: "h.*.attn.c_attn" in "c_attn".
bool is_named(const std::string& module, const std::string& name) {
  return module == name || module.ends_with("." + name);
}

std::string leaf_of(const std::string& name) {
  return name.substr(name.rfind('.') + 1);
}

std::string module_of(const std::string& parameter) {
  return parameter.substr(0, parameter.rfind('.'));
}

// The layers of a model that have weights, tables and the last norm left out.
std::vector<BlockPart> weighted_parts(const ModelConfig& config) {
  if (config.type != "mlp") return block_table(config).parts();
  const std::int64_t h = config.n_embd, v = config.vocab_size;
  std::vector<BlockPart> parts(3);
  const auto set = [&](std::size_t i, const char* name, std::int64_t in,
                       std::int64_t out, Cut cut) {
    parts[i].name = name;
    parts[i].in = in, parts[i].out = out;
    parts[i].bias = true;
    parts[i].cut = cut;
  };
  set(0, "fc1", h, 4 * h, Cut::kColumns);
  set(1, "fc2", 4 * h, h, Cut::kRows);
  set(2, "fc3", h, v, Cut::kWhole);
  return parts;
}

// The layer of this module; a default one for tables and the last norm.
BlockPart part_named(const std::string& module, const ModelConfig& config) {
  for (const BlockPart& part : weighted_parts(config)) {
    if (!part.name.empty() && is_named(module, part.name)) return part;
  }
  return {};
}

Style style_of(const BlockPart& part) {
  return part.cut == Cut::kRows ? rowwise() : colwise();
}

// The shape of a parameter on one device.
Shape whole_of(const std::string& name, const ModelConfig& config) {
  const std::int64_t h = config.n_embd;
  const DecoderNames names = decoder_names(config);
  const std::string module = module_of(name);
  const bool is_table = is_named(module, leaf_of(names.table)) ||
                        is_named(module, leaf_of(names.output()));
  if (is_table) return {config.vocab_size, h};
  if (is_named(module, leaf_of(names.positions))) {
    return {config.n_positions, h};
  }
  const BlockPart part = part_named(module, config);
  if (part.name.empty()) return {h};  // the last norm
  if (part.is_norm()) return {part.out / part.heads};
  if (name.ends_with(".bias")) return {part.out};
  return {part.in, part.out};
}

// How tp cuts a parameter.
Shards cuts_of_tp(const std::string& name, const Topology& grid, int rank,
                  const ModelConfig& config) {
  const int t = grid.size("tp"), index = grid.coordinate(rank, "tp");
  const BlockPart part = part_named(module_of(name), config);
  const bool is_bias = name.ends_with(".bias");
  if (t == 1 || part.cut == Cut::kWhole) return {};
  if (part.cut == Cut::kRows) return is_bias ? Shards() : Shards{{0, index, t}};
  const std::int64_t dim = is_bias ? 0 : 1;
  if (part.columns.empty()) return {{dim, index, t}};
  return {cut_columns(dim, index, t, part.columns)};
}

}  // namespace

Shape shape_on_tp(const std::string& name, const Topology& grid,
                  const ModelConfig& config) {
  return shape_of(cuts_of_tp(name, grid, 0, config), whole_of(name, config));
}

std::vector<ParameterKind> parameter_kinds(const ModelConfig& config) {
  const DecoderNames names = decoder_names(config);
  const auto layers = static_cast<double>(config.n_layer);
  std::vector<ParameterKind> kinds = {{leaf_of(names.table) + ".weight", 1}};
  const auto add = [&](const std::string& module, bool bias, double count) {
    kinds.push_back({module + ".weight", count});
    if (bias) kinds.push_back({module + ".bias", count});
  };
  if (config.type == "mlp") {
    for (const BlockPart& part : weighted_parts(config)) {
      add(part.name, part.bias, 1);
    }
    return kinds;
  }
  if (!names.positions.empty()) add(leaf_of(names.positions), false, 1);
  if (!names.head.empty()) add(names.head, false, 1);
  add(leaf_of(names.norm), block_table(config).norm_1.bias, 1);
  for (const BlockPart& part : weighted_parts(config)) {
    if (part.name.empty()) continue;
    add(leaf_of(names.blocks) + ".*." + part.name, part.bias, layers);
  }
  return kinds;
}

namespace {

// Where a rank's part of a parameter lies: tp cuts first, and dp cuts the rows of
// tp's part, which it need not divide.
Shards shards_of(const std::string& name, const Topology& grid, int rank,
                 const ModelConfig& config, bool is_fsdp) {
  Shards shards = cuts_of_tp(name, grid, rank, config);
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
  const auto divides = [&](std::int64_t parts, const char* what) {
    SB_CHECK(parts % t == 0, "--mesh: ", parts, what,
             " do not divide over tp=", t, "; give a tp that divides them");
  };
  divides(parts, is_mlp ? " hidden units" : " heads");
  if (config.is_llama()) {
    divides(config.llama.kv_heads, " heads of keys");
    divides(config.llama.intermediate_size, " hidden units");
  }
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
  SB_CHECK(config.llama.num_experts == 0, "--model ", options.model,
           ": this chapter shards dense blocks; give a model without experts");
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
          const BlockPart part = part_named(name, config);
          if (part.cut == Cut::kWhole) return;
          add_layout_hooks(module, tp, style_of(part), part.in, part.out);
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
    if (part.bias) {
      made->bias =
          make_constant_parameter({part.out}, 0, part_of(name + ".bias", init));
    }
    lend(name, *made, [&](Module& module) {
      add_layout_hooks(module, tp, style_of(part), part.in, part.out);
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
                                   {config.n_positions, config.n_embd});
    return slice(weight, 0, 0, tokens.size(-1));
  };
  layers.norm = [=](const std::string& name, const BlockPart& part, double eps,
                    const InitOptions& init) {
    AnyModule made =
        one_device.norm(name, part, eps, part_of(name + ".weight", init));
    lend(name, *made);
    return made;
  };
  // This rank's heads
  layers.head_rank = static_cast<int>(tp.coordinate()[0]);
  layers.head_ranks = static_cast<int>(tp.shape()[0]);
  layers.logits = [=](const Tensor& x, AnyModule& wte) {
    const Tensor weight = borrowed(wte.as<Embedding>().weight, dp, placement,
                                   {config.vocab_size, config.n_embd});
    const Tensor rows = shardbook::reshape(x, {-1, weight.size(1)});
    return shardbook::reshape(shardbook::matmul(rows, weight, false, true),
                              {x.size(0), x.size(1), weight.size(0)});
  };
  layers.loss = [dp](const Tensor& logits, const Tensor& targets) {
    return cross_entropy(from_local(logits, dp, {shard(0)}),
                         own_rows(targets, dp))
        .full_tensor();
  };
  if (config.type == "mlp" || block_table(config).head_norms.empty()) {
    return model;
  }
  // Norms over heads: every rank of tp lends its weight to its own heads, so its
  // gradient is a term of a sum
  model.make = [=, layers = model.layers, layout = model.layout](
                   const ModelConfig& config, const InitOptions& init) {
    auto gpt = std::make_unique<Gpt>(config, init, layers);
    const DecoderNames names = decoder_names(config);
    for (std::size_t i = 0; i < gpt->h.size(); ++i) {
      const BlockTable block = block_table(config);
      for (std::size_t n = 0; n < block.head_norms.size(); ++n) {
        RmsNorm& norm = gpt->h[i].attn.head_norms[n];
        const std::string name = names.block(static_cast<std::int64_t>(i)) +
                                 "." + block.head_norms[n].name;
        const MemoryScope kind(MemoryKind::kParameter);
        norm.weight =
            take_part(norm.weight.detach(), layout(name + ".weight", rank))
                .set_requires_grad();
        lend(name, norm, [&](Module& module) {
          lend_parameters(module, tp, replicate(),
                          {whole_of(name + ".weight", config)});
        });
      }
    }
    return gpt;
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

// One parameter of each layout.
std::vector<std::string> kinds_of_layouts(const ModelConfig& config) {
  if (config.type == "mlp") {
    return {"wte.weight", "fc1.weight", "fc2.weight", "fc3.weight"};
  }
  const DecoderNames names = decoder_names(config);
  const BlockTable block = block_table(config);
  std::vector<std::string> kinds = {leaf_of(names.table) + ".weight"};
  for (const BlockPart* part :
       {&block.norm_1, &block.qkv, &block.proj, &block.up, &block.down}) {
    kinds.push_back(leaf_of(names.blocks) + ".*." + part->name + ".weight");
  }
  return kinds;
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
    for (const ParameterKind& kind : parameter_kinds(config)) {
      const std::int64_t rows = shape_on_tp(kind.name, grid, config)[0];
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
