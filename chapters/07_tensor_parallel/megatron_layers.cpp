#include "chapters/07_tensor_parallel/megatron_layers.h"

#include <algorithm>
#include <memory>

#include "chapters/common/run/training.h"
#include "chapters/common/sharded/sharded_strategy.h"
#include "core/check.h"

namespace shardbook::tensor_parallel {
namespace {

/// The last name on a module's path: "transformer.h.0.mlp.c_fc" -> "c_fc".
std::string leaf_name(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

/// Part `rank` of t of a product's weight, or of its bias.
Shards part_of(const BlockPart& part, bool is_bias, int rank, int t) {
  if (part.cut == shardbook::Cut::kColumns) {
    return {cut_columns(is_bias ? 0 : 1, rank, t, part.columns)};
  }
  if (part.cut == shardbook::Cut::kRows && !is_bias) return {{0, rank, t}};
  return {};
}

}  // namespace

// --- Linear ------------------------------------------------------------------

ColumnParallelLinear::ColumnParallelLinear(const std::string& name,
                                           const LinearShape& shape,
                                           InitOptions init, ProcessGroup& tp,
                                           bool gather_output)
    : tp_(&tp), gather_output_(gather_output) {
  init.shards = {cut_columns(1, tp.rank(), tp.size(), shape.columns)};
  weight = make_parameter(name + ".weight", {shape.in, shape.out}, shape.stddev,
                          init);
  init.shards[0].dim = 0;
  if (shape.bias) bias = make_constant_parameter({shape.out}, 0, init);
}

Tensor ColumnParallelLinear::forward(const Tensor& x) {
  // Columns need no message; in backward, f sums the gradient of x
  const Tensor y = linear(x, weight, bias, sum_input_gradients(*tp_));
  return gather_output_ ? gather_from(y, *tp_) : y;
}

void ColumnParallelLinear::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
  if (bias.defined()) visit.parameter("bias", bias);
}

RowParallelLinear::RowParallelLinear(const std::string& name,
                                     const LinearShape& shape, InitOptions init,
                                     ProcessGroup& tp, bool input_is_parallel)
    : tp_(&tp), input_is_parallel_(input_is_parallel) {
  init.shards = {{0, tp.rank(), tp.size()}};
  weight = make_parameter(name + ".weight", {shape.in, shape.out}, shape.stddev,
                          init);
  init.shards.clear();
  if (shape.bias) bias = make_constant_parameter({shape.out}, 0, init);
}

Tensor RowParallelLinear::forward(const Tensor& x) {
  const Tensor part = input_is_parallel_ ? x : scatter_to(x, *tp_);
  if (tp_->size() == 1) return linear(part, weight, bias);
  // Rows are parts of a sum; the bias is added after it
  const Tensor sum = reduce_from(linear(part, weight), *tp_);
  return bias.defined() ? add(sum, bias) : sum;
}

void RowParallelLinear::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
  if (bias.defined()) visit.parameter("bias", bias);
}

// --- Vocabulary --------------------------------------------------------------

VocabParallelEmbedding::VocabParallelEmbedding(const std::string& name,
                                               std::int64_t rows,
                                               std::int64_t width,
                                               double stddev, InitOptions init,
                                               ProcessGroup& tp)
    : tp_(&tp) {
  init.shards = {{0, tp.rank(), tp.size()}};
  weight = make_parameter(name + ".weight", {rows, width}, stddev, init);
}

Tensor VocabParallelEmbedding::forward(const Tensor& ids) {
  if (tp_->size() == 1) return embedding(weight, ids);
  return reduce_from(embedding_part(weight, ids, first_row()), *tp_);
}

void VocabParallelEmbedding::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
}

Tensor vocab_parallel_cross_entropy(const Tensor& logits, const Tensor& targets,
                                    std::int64_t num_classes, ProcessGroup& tp,
                                    Reduction reduction) {
  const std::int64_t first = tp.rank() * logits.size(-1);
  return cross_entropy_part(
      logits, targets, first, num_classes,
      [&tp](const Tensor& x, bool is_max) {
        tp.all_reduce(x, is_max ? ReduceOp::kMax : ReduceOp::kSum, "loss")
            .wait();
      },
      reduction);
}

std::int64_t padded_vocabulary(std::int64_t vocabulary, int t,
                               std::int64_t divisible_by) {
  return shardbook::padded_vocabulary(vocabulary, divisible_by * t);
}

// --- A GPT -------------------------------------------------------------------

bool takes_rows(const std::string& name, const BlockPart& part) {
  SB_CHECK(part.cut != shardbook::Cut::kWhole,
           "tensor parallelism: no rule says how to cut ", name,
           "; its row of the block's table has neither columns nor rows");
  return part.cut == shardbook::Cut::kRows;
}

LinearShape shape_of(const BlockPart& part) {
  return {part.in, part.out, part.columns, part.stddev, part.bias};
}

Shards layout(const ModelConfig& config, const std::string& name, int rank,
              int t) {
  if (t == 1) return {};
  const std::string layer = leaf_name(name.substr(0, name.rfind('.')));
  const DecoderNames names = decoder_names(config);
  if (layer == leaf_name(names.table) || layer == leaf_name(names.output())) {
    return {{0, rank, t}};
  }
  std::vector<BlockPart> parts = block_table(config).parts();
  if (name.find(".shared_experts.") != std::string::npos) {
    parts = shared_expert_parts(config);
  }
  for (const BlockPart& part : parts) {
    if (part.leaf() != layer) continue;
    return part_of(part, name.ends_with(".bias"), rank, t);
  }
  // Of experts: their gates, and the weights of a residual branch
  const std::vector<std::string> whole = {leaf_name(names.norm),
                                          leaf_name(names.positions), "gate",
                                          "shared_gate", "coefficient"};
  SB_CHECK(std::find(whole.begin(), whole.end(), layer) != whole.end(),
           "tensor parallelism: no rule says how to cut ", name);
  return {};
}

void check_ranks(const ModelConfig& config, int t, const std::string& what) {
  SB_CHECK(config.n_head % t == 0, what, ": the ranks share ", config.n_head,
           " heads; give a divisor of ", config.n_head);
  if (!config.is_llama()) return;
  const std::int64_t keys = config.llama.kv_heads;
  SB_CHECK(keys % t == 0 || t % keys == 0, what, ": the ranks share ", keys,
           " heads of keys; give a divisor or a multiple of ", keys);
  const std::int64_t hidden = block_table(config).down.in;
  SB_CHECK(hidden % t == 0, what, ": the ranks share ", hidden,
           " hidden units; give a divisor of ", hidden);
  const std::int64_t shared = config.llama.shared_intermediate_size;
  SB_CHECK(shared % t == 0, what, ": the ranks share ", shared,
           " hidden units of a shared expert; give a divisor of ", shared);
}

LayerFactory layers(const ModelConfig& config, ProcessGroup& tp,
                    RngTracker* rng) {
  check_ranks(config, tp.size(),
              "tensor parallelism over " + std::to_string(tp.size()));
  LayerFactory made;
  made.head_rank = tp.rank();
  made.head_ranks = tp.size();
  made.linear = [&tp](const std::string& name, const BlockPart& part,
                      const InitOptions& init) -> AnyModule {
    if (part.cut == shardbook::Cut::kWhole) {
      return LayerFactory().linear(name, part, init);
    }
    if (takes_rows(name, part)) {
      return {
          std::make_unique<RowParallelLinear>(name, shape_of(part), init, tp)};
    }
    return {
        std::make_unique<ColumnParallelLinear>(name, shape_of(part), init, tp)};
  };
  made.embedding = [&tp](const std::string& name, std::int64_t rows,
                         std::int64_t width, double stddev,
                         const InitOptions& init) -> AnyModule {
    return {std::make_unique<VocabParallelEmbedding>(name, rows, width, stddev,
                                                     init, tp)};
  };
  made.for_heads = [&tp](const Tensor& x) { return copy_to(x, tp); };
  // Each rank computes its own heads, with the masks that one device draws for
  // them
  if (rng != nullptr) {
    made.attention = [rng](const Tensor& qkv, AttentionOptions options) {
      // Heads are cut: draw from the stream that differs between ranks
      const RngTracker::Fork fork(*rng, kTensorStream);
      options.shard = {};
      return attention(qkv, options);
    };
  }
  made.logits = [&tp](const Tensor& x, AnyModule& wte) {
    const Tensor& table = wte.as<VocabParallelEmbedding>().weight;
    const Tensor rows = reshape(copy_to(x, tp), {-1, table.size(1)});
    return reshape(matmul(rows, table, false, true),
                   {x.size(0), x.size(1), table.size(0)});
  };
  made.loss = [&tp, classes = config.vocab_size](const Tensor& logits,
                                                 const Tensor& targets) {
    const Tensor loss =
        vocab_parallel_cross_entropy(logits, targets, classes, tp);
    note_local_loss(loss);
    return loss;
  };
  return made;
}

}  // namespace shardbook::tensor_parallel
