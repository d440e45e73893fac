#include "chapters/08_tensor_parallel_2d/summa_strategy.h"

#include "chapters/08_tensor_parallel_2d/summa_layers.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::summa {

namespace {

ShardedModel sharded_model(const Options& options, const Grid& grid) {
  const std::int64_t vocabulary = model_config(options).vocab_size;
  return {layers(grid, vocabulary),
          [q = grid.q()](const std::string& name, int rank) {
            return layout(name, place_of(rank, q));
          },
          padded_vocabulary(vocabulary, grid.q()),
          {}};
}

}  // namespace

Options checked_parts(const Options& options, const Passes& passes,
                      int row_parts, int columns, const std::string& what) {
  const ModelConfig config = model_config(options);
  if (config.type != "gpt2") return options;  // ShardedStrategy refuses it
  check_divides("--batch", options.batch, passes.micro_batches * row_parts,
                passes.micro_batches == 1
                    ? "the batch is cut into"
                    : "micro-batches and ranks cut it into");
  const std::string model = "--model " + options.model;
  check_divides(model + ": n_head", config.n_head, columns,
                "heads are cut into");
  check_divides(model + ": n_embd", config.n_embd, columns * columns, what);
  return options;
}

SummaStrategy::SummaStrategy(const Options& options, const Grid& grid,
                             ProcessGroup& group, const Passes& passes)
    : ShardedStrategy(checked_parts(options, passes, grid.row_parts(), grid.q(),
                                    "vectors are cut into"),
                      sharded_model(options, grid), group, passes),
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
