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
  if (!setup.sequence_parallel) return;
  SB_CHECK(!is_mlp,
           "--sequence-parallel: the mlp sees its tokens one by one; "
           "give gpt-nano, llama-nano or another decoder");
  SB_CHECK(options.seq % t == 0, "--seq ", options.seq,
           ": --sequence-parallel cuts it over tp=", t, "; give a multiple of ",
           t);
}

ModelConfig config_of(const ModelOptions& options) {
  const ModelConfig config = model_config(options);
  SB_CHECK(!config.is_image(), "--model ", options.model,
           ": this chapter shards a GPT or the mlp; give mlp, gpt-nano, gpt2 "
           "or another one of its family");
  SB_CHECK(config.llama.num_experts == 0, "--model ", options.model,
           ": this chapter shards dense blocks; give a model without experts");
  return config;
}

Placement placement_of(const StrategyOptions& setup) {
  return setup.data_parallel == "fsdp" ? shard(0) : replicate();
}

DTensorLayout layout_of(const StrategyOptions& setup, const Topology& grid,
                        const ModelConfig& config) {
  return {config, grid, setup.data_parallel == "fsdp", setup.sequence_parallel};
}

Style style_of(const BlockPart& part) {
  return part.cut == Cut::kRows ? rowwise() : colwise();
}

// dp's rows of a batch that every rank has whole.
DTensor own_rows(const Tensor& whole, const Mesh& dp) {
  return cut_tensor(whole, dp, {shard(0)});
}

ShardedModel sharded_model(const StrategyOptions& setup, DeviceMesh& devices,
                           const ModelConfig& config) {
  const Mesh mesh(devices), dp(devices, {"dp"}), tp(devices, {"tp"});
  const DTensorLayout layout = layout_of(setup, devices.topology(), config);
  // Placements over tp: of tokens [n, S, ..] between attention and MLP, and of
  // logits [n, S, V]
  const bool is_cut = setup.sequence_parallel;
  const Placement stream = is_cut ? shard(1) : replicate();
  const Placement classes = is_cut ? shard(2) : replicate();
  const Placement placement = placement_of(setup);
  const int rank = devices.world().rank();
  ShardedModel model;
  model.layout = [=](const std::string& name, int rank) {
    return layout.part(name, rank);
  };
  const auto part_of = [=](const std::string& name, InitOptions init) {
    init.shards = layout.part(name, rank);
    return init;
  };
  const auto lend =
      [=](
          const std::string& name, Module& module,
          const std::function<void(Module&)>& inside = [](Module&) {}) {
        std::vector<Shape> whole;
        for (const NamedTensor& each : module.named_parameters()) {
          whole.push_back(layout.on_tp(name + "." + each.name, rank));
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
    model.make = [=](const ModelConfig& config, const InitOptions& init) {
      auto mlp = std::make_unique<MlpModel>(config, init);
      mlp->replace_tensors([&](const std::string& name, const Tensor& whole) {
        const MemoryScope kind(MemoryKind::kParameter);
        return take_part(whole.detach(), layout.part(name, rank))
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
  const auto on_own_tokens = [=](Module& module) {
    if (is_cut) add_layout_hooks(module, tp, sequence(), 0, 0);
  };

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
      Style style = style_of(part);
      (part.cut == Cut::kRows ? style.output : style.input) = stream;
      add_layout_hooks(module, tp, style, part.in, part.out);
    });
    return {std::move(made)};
  };
  layers.embedding = [=](const std::string& name, std::int64_t rows,
                         std::int64_t width, double stddev,
                         const InitOptions& init) -> AnyModule {
    AnyModule made = one_device.embedding(name, rows, width, stddev,
                                          part_of(name + ".weight", init));
    (*made).add_forward_pre_hook(read_own_rows);
    lend(name, *made, [&](Module& module) {
      if (!is_cut) return;
      Style style = rowwise();
      style.output = stream;
      add_layout_hooks(module, tp, style, rows, width);
    });
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
    const Tensor all = slice(weight, 0, 0, tokens.size(-1));
    return is_cut ? cut_tensor(all, tp, {shard(0)}).to_local() : all;
  };
  layers.norm = [=](const std::string& name, const BlockPart& part, double eps,
                    const InitOptions& init) {
    AnyModule made =
        one_device.norm(name, part, eps, part_of(name + ".weight", init));
    lend(name, *made, on_own_tokens);
    return made;
  };
  layers.dropout = [=](double p) {
    AnyModule made = one_device.dropout(p);
    on_own_tokens(*made);
    return made;
  };
  // This rank's heads
  layers.head_rank = static_cast<int>(tp.coordinate()[0]);
  layers.head_ranks = static_cast<int>(tp.shape()[0]);
  layers.logits = [=](const Tensor& x, AnyModule& wte) {
    const std::string name = decoder_names(config).output() + ".weight";
    const Tensor weight = borrowed(wte.as<Embedding>().weight, dp, placement,
                                   layout.on_tp(name, rank));
    Tensor all = x;
    if (is_cut) {
      all = from_local(x, tp, {stream})
                .redistribute({replicate()})
                .to_local({partial()});
    }
    const Tensor rows = shardbook::reshape(all, {-1, weight.size(1)});
    return shardbook::reshape(shardbook::matmul(rows, weight, false, true),
                              {all.size(0), all.size(1), weight.size(0)});
  };
  layers.loss = [=](const Tensor& logits, const Tensor& targets) {
    const Shape whole = {targets.size(0), targets.size(1),
                         config.num_classes()};
    return cross_entropy(from_local(logits, mesh, {shard(0), classes}, whole),
                         cut_tensor(targets, mesh, {shard(0), replicate()}))
        .full_tensor();
  };
  if (config.type == "mlp" || block_table(config).head_norms.empty()) {
    return model;
  }
  // Norms over heads: every rank of tp lends its weight to its own heads, so its
  // gradient is a term of a sum
  model.make = [=, layers = model.layers](const ModelConfig& config,
                                          const InitOptions& init) {
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
            take_part(norm.weight.detach(), layout.part(name + ".weight", rank))
                .set_requires_grad();
        lend(name, norm,
             [&](Module& module) { lend_parameters(module, tp, replicate()); });
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
  line.add({"--mesh", may_differ::kRanks}, &setup.mesh,
           "ranks as DPxTP, such as 2x2; TP alone: tensor parallelism");
  line.add({"--data-parallel", may_differ::kPlace}, &setup.data_parallel,
           "what dp does with parameters: shards or replicas", {"fsdp", "ddp"});
  line.add({"--micro-batches", may_differ::kSums}, &setup.micro_batches,
           "micro-batches per step", 1);
  line.add({"--sequence-parallel", may_differ::kSums}, &setup.sequence_parallel,
           "tp cuts tokens at norms and dropout, and the vocabulary of tables, "
           "logits and loss");
  line.add({"--picture", may_differ::kOutput}, &setup.picture,
           "a file for the picture of who holds which block, as SVG");
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
  if (!names.head.empty()) kinds.push_back(names.head + ".weight");
  for (const BlockPart* part :
       {&block.norm_1, &block.qkv, &block.proj, &block.up, &block.down}) {
    kinds.push_back(leaf_of(names.blocks) + ".*." + part->name + ".weight");
  }
  return kinds;
}

}  // namespace

namespace {

// Equal numbers for coordinates of one axis whose ranks have parameters of equal
// `sizes`.
std::vector<int> classes_of(
    int count, const std::function<std::vector<Shape>(int index)>& sizes) {
  std::map<std::vector<Shape>, int> known;
  std::vector<int> classes;
  for (int index = 0; index < count; ++index) {
    const auto next = static_cast<int>(known.size());
    classes.push_back(known.emplace(sizes(index), next).first->second);
  }
  return classes;
}

}  // namespace

// Rows that ranks do not divide give the last ones smaller parts. Each axis has
// classes of its own: a rank that stands for others must find theirs around it.
FoldClass fold_class(const Options& options, const StrategyOptions& setup) {
  const Topology grid = topology_of(setup, options.world_size);
  const ModelConfig config = config_of(options);
  check_sizes(options, setup, grid, config);
  const DTensorLayout layout = layout_of(setup, grid, config);
  const std::vector<ParameterKind> kinds = parameter_kinds(config);
  const int d = grid.size("dp"), t = grid.size("tp");
  const auto over_tp = classes_of(t, [&](int tp) {
    std::vector<Shape> parts;
    for (const ParameterKind& kind : kinds) {
      parts.push_back(
          layout.on_tp(kind.name, grid.get_rank({{"dp", 0}, {"tp", tp}})));
    }
    return parts;
  });
  // Of tp's parts, the last may be shorter
  const auto over_dp = classes_of(d, [&](int dp) {
    std::vector<Shape> parts;
    for (const ParameterKind& kind : kinds) {
      for (const int tp : {0, t - 1}) {
        parts.push_back(shape_of(
            layout.part(kind.name, grid.get_rank({{"dp", dp}, {"tp", tp}})),
            layout.whole(kind.name)));
      }
    }
    return parts;
  });
  return [=](int rank) {
    const auto at = [&](const char* axis) {
      return static_cast<std::size_t>(grid.coordinate(rank, axis));
    };
    return over_dp[at("dp")] * t + over_tp[at("tp")];
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
      layout_(layout_of(setup, devices.topology(), config())),
      d_(devices.size("dp")),
      t_(devices.size("tp")) {}

std::string DTensorStrategy::remarks() {
  if (devices_.world().rank() != 0) return "";
  const Topology& grid = devices_.topology();
  std::vector<Held> rows;
  for (const std::string& name : kinds_of_layouts(config())) {
    rows.push_back(held_by(name, layout_.whole(name), grid.world_size(),
                           [&](int rank) { return layout_.part(name, rank); }));
  }
  const std::string title = "Ranks that hold each block, on " + grid.text();
  if (!setup_.picture.empty()) {
    write_text_file(setup_.picture, picture_svg(title, rows),
                    "--picture " + setup_.picture + ": this file");
  }
  return title + ":\n" + picture_text(rows) + "\n";
}

}  // namespace shardbook::dtensor
