#include "chapters/08_tensor_parallel_2d/summa_strategy.h"

#include <algorithm>

#include "chapters/08_tensor_parallel_2d/summa_layers.h"
#include "chapters/common/run/textbook.h"
#include "core/check.h"

namespace shardbook::summa {

namespace {

ShardedModel sharded_model(const Options& options, const Grid& grid,
                           ProcessGroup& world) {
  const ModelConfig config = sharded_gpt_config(options);
  return {layers(grid, config.vocab_size),
          [all = Parameters(config), q = grid.q()](const std::string& name,
                                                   int rank) {
            return layout(all.of(name), place_of(rank, q));
          },
          padded_vocabulary(config.vocab_size, grid.q()),
          sum_head_norms(config, world)};
}

}  // namespace

Options checked_parts(const Options& options, const Passes& passes,
                      const PartCounts& parts) {
  const ModelConfig config = model_config(options);
  if (!config.has_blocks()) return options;  // ShardedStrategy refuses it
  check_divides(
      "--batch", options.batch, passes.micro_batches * parts.batch_rows,
      passes.micro_batches == 1 ? "the batch is cut into"
                                : "micro-batches and ranks cut it into");
  const std::string model = "--model " + options.model + ": ";
  SB_CHECK(config.llama.num_experts == 0, model,
           "this chapter shards dense blocks; give a model without experts");
  const bool is_llama = config.is_llama();
  check_divides(model + (is_llama ? "num_attention_heads" : "n_head"),
                config.n_head, parts.columns, "heads are cut into");
  if (is_llama) {
    check_divides(model + "num_key_value_heads", config.llama.kv_heads,
                  parts.columns, "heads of keys are cut into");
  }
  check_divides(model + (is_llama ? "hidden_size" : "n_embd"), config.n_embd,
                std::max(parts.vectors, parts.weight_rows),
                parts.vectors > parts.weight_rows
                    ? "vectors are cut into"
                    : "rows of weights are cut into");
  for (const BlockPart& part : block_table(config).parts()) {
    if (part.kind != PartKind::kProduct) continue;
    check_divides(model + "rows of " + part.name, part.in, parts.weight_rows,
                  "they are cut into");
    if (!part.bias) continue;
    check_divides(model + "bias of " + part.name, part.out, parts.vectors,
                  "it is cut into");
  }
  return options;
}

SummaStrategy::SummaStrategy(const Options& options, const Grid& grid,
                             ProcessGroup& group, const Passes& passes)
    : ShardedStrategy(checked_parts(options, passes,
                                    {grid.row_parts(), grid.q(), grid.q(),
                                     grid.q() * grid.q()}),
                      sharded_model(options, grid, group), group, passes),
      grid_(grid) {}

std::vector<Bill> SummaStrategy::bills() {
  Sizes s{sizes()};
  s.q = grid_.q();
  s.d = grid_.d();
  Bill bill = bill_of(parameters_per_rank(s), kept_bytes(s), step_bytes(s));
  if (textbook::is_chosen(options_)) bill.step_s = step_s(s);
  return {bill};
}

}  // namespace shardbook::summa
