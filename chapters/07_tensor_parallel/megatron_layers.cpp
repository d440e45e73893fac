#include "chapters/07_tensor_parallel/megatron_layers.h"

#include <algorithm>
#include <iterator>
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

/// Layers, and an expert layer's own parameters, that every rank has whole.
constexpr const char* kWhole[] = {"ln_1", "ln_2",        "ln_f",       "wpe",
                                  "gate", "shared_gate", "coefficient"};

}  // namespace

// --- Linear ------------------------------------------------------------------

ColumnParallelLinear::ColumnParallelLinear(const std::string& name,
                                           const LinearShape& shape,
                                           InitOptions init, ProcessGroup& tp,
                                           bool gather_output)
    : tp_(&tp), gather_output_(gather_output) {
  init.shards = {{1, tp.rank(), tp.size(), shape.blocks}};
  weight = make_parameter(name + ".weight", {shape.in, shape.out}, shape.stddev,
                          init);
  init.shards[0].dim = 0;
  bias = make_constant_parameter({shape.out}, 0, init);
}

Tensor ColumnParallelLinear::forward(const Tensor& x) {
  // Columns need no message; in backward, f sums the gradient of x
  const Tensor y = linear(x, weight, bias, sum_input_gradients(*tp_));
  return gather_output_ ? gather_from(y, *tp_) : y;
}

void ColumnParallelLinear::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
  visit.parameter("bias", bias);
}

RowParallelLinear::RowParallelLinear(const std::string& name,
                                     const LinearShape& shape, InitOptions init,
                                     ProcessGroup& tp, bool input_is_parallel)
    : tp_(&tp), input_is_parallel_(input_is_parallel) {
  init.shards = {{0, tp.rank(), tp.size(), shape.blocks}};
  weight = make_parameter(name + ".weight", {shape.in, shape.out}, shape.stddev,
                          init);
  init.shards.clear();
  bias = make_constant_parameter({shape.out}, 0, init);
}

Tensor RowParallelLinear::forward(const Tensor& x) {
  const Tensor part = input_is_parallel_ ? x : scatter_to(x, *tp_);
  if (tp_->size() == 1) return linear(part, weight, bias);
  // Rows are parts of a sum; the bias is added after it
  return add(reduce_from(linear(part, weight), *tp_), bias);
}

void RowParallelLinear::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
  visit.parameter("bias", bias);
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
  const std::size_t blocks = std::max<std::size_t>(part.columns.size(), 1);
  return {part.in, part.out, static_cast<std::int64_t>(blocks), part.stddev};
}

Shards layout(const std::string& name, int rank, int t) {
  if (t == 1) return {};
  const auto is = [&](const char* end) { return name.ends_with(end); };
  if (is(".c_attn.weight")) return {{1, rank, t, 3}};
  if (is(".c_attn.bias")) return {{0, rank, t, 3}};
  if (is(".c_fc.weight")) return {{1, rank, t}};
  if (is(".c_fc.bias")) return {{0, rank, t}};
  if (is(".c_proj.weight")) return {{0, rank, t}};
  if (is("wte.weight")) return {{0, rank, t}};
  const std::string owner = leaf_name(name.substr(0, name.rfind('.')));
  const bool is_whole =
      is(".c_proj.bias") ||
      std::count(std::begin(kWhole), std::end(kWhole), owner) > 0;
  SB_CHECK(is_whole, "tensor parallelism: no rule says how to cut ", name);
  return {};
}

LayerFactory layers(const ModelConfig& config, ProcessGroup& tp,
                    RngTracker* rng) {
  const int t = tp.size();
  SB_CHECK(config.n_head % t == 0, "tensor parallelism: ", config.n_head,
           " heads do not divide over ", t, " ranks; give a divisor of ",
           config.n_head);
  LayerFactory made;
  made.linear = [&tp](const std::string& name, const BlockPart& part,
                      const InitOptions& init) -> AnyModule {
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
  // Each rank computes its own heads
  made.attention = [&tp, rng](const Tensor& qkv, AttentionOptions options) {
    const std::int64_t own = options.heads / tp.size(), s = qkv.size(1);
    // Heads are cut: draw from the stream that differs between ranks
    if (rng != nullptr) {
      const RngTracker::Fork fork(*rng, kTensorStream);
      options.heads = own;
      return attention(qkv, options);
    }
    // Draw the masks that one device draws for them
    if (tp.size() > 1) {
      options.shard = {
          {qkv.size(0), options.heads, s, s}, {0, tp.rank() * own, 0, 0}, {}};
    }
    options.heads = own;
    return attention(qkv, options);
  };
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
