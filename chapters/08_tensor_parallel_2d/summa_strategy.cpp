#include "chapters/08_tensor_parallel_2d/summa_strategy.h"

#include <cmath>

#include "chapters/08_tensor_parallel_2d/summa_layers.h"
#include "chapters/common/run/textbook.h"
#include "core/check.h"

namespace shardbook::summa {

namespace {

Options checked(const Options& options, const Grid& grid,
                const Passes& passes) {
  const ModelConfig config = model_config(options);
  if (config.type != "gpt2") return options;  // ShardedStrategy refuses it
  const int q = grid.q();
  check_divides(
      "--batch", options.batch, passes.micro_batches * grid.row_parts(),
      passes.micro_batches == 1 ? "the batch is cut into"
                                : "micro-batches and ranks cut it into");
  const std::string model = "--model " + options.model;
  check_divides(model + ": n_head", config.n_head, q, "heads are cut into");
  check_divides(model + ": n_embd", config.n_embd, q * q,
                "vectors are cut into");
  return options;
}

ShardedModel sharded_model(const Options& options, const Grid& grid) {
  const std::int64_t vocabulary = model_config(options).vocab_size;
  ShardedModel model;
  model.layers = layers(grid, vocabulary);
  const int q = grid.q();
  model.layout = [q](const std::string& name, int rank) {
    return layout(name, place_of(rank, q));
  };
  model.padded_vocabulary = padded_vocabulary(vocabulary, q);
  return model;
}

}  // namespace

SummaStrategy::SummaStrategy(const Options& options, const Grid& grid,
                             ProcessGroup& group, const Passes& passes)
    : ShardedStrategy(checked(options, grid, passes),
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

// --- The documents' MLP ------------------------------------------------------------

std::string describe_mlp(int q, int d) {
  constexpr std::int64_t kRows = 16, kWidth = 256, kInner = 1024;
  if (kRows % (q * d) != 0 || kWidth % (q * q) != 0) return "";
  const auto block = [q](std::int64_t rows, std::int64_t columns) {
    return shape_text({rows / q, columns / q});
  };
  const std::int64_t rows = kRows / d;
  const double moved = linear_elements(q, d, kRows, kWidth, kInner) +
                       linear_elements(q, d, kRows, kInner, kWidth);
  return "An MLP of [16, 256], 256 -> 1024 -> 256: on each rank input " +
         block(rows, kWidth) + ", weights " + block(kWidth, kInner) + " and " +
         block(kInner, kWidth) + ", outputs " + block(rows, kInner) + " and " +
         block(rows, kWidth) + "; " + std::to_string(std::llround(moved)) +
         " elements sent per rank, forward and backward\n";
}

std::string SummaStrategy::remarks() {
  return describe_mlp(grid_.q(), grid_.d());
}

}  // namespace shardbook::summa
