#include "chapters/08_tensor_parallel_2d/summa_strategy.h"

#include <cmath>

#include "chapters/08_tensor_parallel_2d/summa_layers.h"
#include "chapters/common/run/textbook.h"
#include "core/check.h"

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

// --- The documents' MLP ------------------------------------------------------------

std::string describe_mlp(
    int row_parts, int weight_parts, int columns,
    const std::function<double(double m, double k, double n)>& elements) {
  constexpr std::int64_t kRows = 16, kWidth = 256, kInner = 1024;
  if (kRows % row_parts != 0 || kWidth % (columns * columns) != 0) return "";
  const auto rows_of = [=](std::int64_t width) {
    return shape_text({kRows / row_parts, width / columns});
  };
  const auto weight = [=](std::int64_t in, std::int64_t out) {
    return shape_text({in / weight_parts, out / columns});
  };
  const double moved =
      elements(kRows, kWidth, kInner) + elements(kRows, kInner, kWidth);
  return "An MLP of [16, 256], 256 -> 1024 -> 256: on each rank input " +
         rows_of(kWidth) + ", weights " + weight(kWidth, kInner) + " and " +
         weight(kInner, kWidth) + ", outputs " + rows_of(kInner) + " and " +
         rows_of(kWidth) + "; " + std::to_string(std::llround(moved)) +
         " elements sent per rank, forward and backward\n";
}

std::string describe_mlp(int q, int d) {
  return describe_mlp(q * d, q, q, [=](double m, double k, double n) {
    return linear_elements(q, d, m, k, n);
  });
}

std::string SummaStrategy::remarks() {
  return describe_mlp(grid_.q(), grid_.d());
}

}  // namespace shardbook::summa
