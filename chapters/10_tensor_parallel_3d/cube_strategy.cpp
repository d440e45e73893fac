#include "chapters/10_tensor_parallel_3d/cube_strategy.h"

#include <cmath>

#include "chapters/10_tensor_parallel_3d/cube_layers.h"
#include "chapters/common/run/textbook.h"
#include "core/check.h"

namespace shardbook::cube {

namespace {

Options checked(const Options& options, const Cube& cube,
                const Passes& passes) {
  const ModelConfig config = model_config(options);
  if (config.type != "gpt2") return options;  // ShardedStrategy refuses it
  const int l = cube.l();
  check_divides("--batch", options.batch, passes.micro_batches * l * l,
                passes.micro_batches == 1
                    ? "the batch is cut into"
                    : "micro-batches and ranks cut it into");
  const std::string model = "--model " + options.model;
  check_divides(model + ": n_head", config.n_head, l, "heads are cut into");
  check_divides(model + ": n_embd", config.n_embd, l * l,
                "rows of weights are cut into");
  return options;
}

ShardedModel sharded_model(const Options& options, const Cube& cube) {
  const std::int64_t vocabulary = model_config(options).vocab_size;
  ShardedModel model;
  model.layers = layers(cube, vocabulary);
  const int l = cube.l();
  model.layout = [l](const std::string& name, int rank) {
    return layout(name, place_of(rank, l));
  };
  model.padded_vocabulary = padded_vocabulary(vocabulary, l * l);
  return model;
}

}  // namespace

CubeStrategy::CubeStrategy(const Options& options, const Cube& cube,
                           ProcessGroup& group, const Passes& passes)
    : ShardedStrategy(checked(options, cube, passes),
                      sharded_model(options, cube), group, passes),
      cube_(cube) {}

std::vector<Bill> CubeStrategy::bills() {
  Sizes s{sizes()};
  s.l = cube_.l();
  s.keep_gathered = cube_.keep_gathered;
  Bill bill = bill_of(parameters_per_rank(s), kept_bytes(s), step_bytes(s));
  if (textbook::is_chosen(options_)) bill.step_s = step_s(s);
  return {bill};
}

// --- The documents' MLP ------------------------------------------------------------

std::string describe_mlp(int l) {
  constexpr std::int64_t kRows = 16, kWidth = 256, kInner = 1024;
  const int parts = l * l;
  if (kRows % parts != 0 || kWidth % parts != 0) return "";
  const auto block = [=](std::int64_t rows, std::int64_t columns) {
    return shape_text({rows / parts, columns / l});
  };
  const double moved = linear_elements(l, kRows, kWidth, kInner) +
                       linear_elements(l, kRows, kInner, kWidth);
  return "An MLP of [16, 256], 256 -> 1024 -> 256: on each rank input " +
         block(kRows, kWidth) + ", weights " + block(kWidth, kInner) + " and " +
         block(kInner, kWidth) + ", outputs " + block(kRows, kInner) + " and " +
         block(kRows, kWidth) + "; " + std::to_string(std::llround(moved)) +
         " elements sent per rank, forward and backward\n";
}

std::string CubeStrategy::remarks() { return describe_mlp(cube_.l()); }

}  // namespace shardbook::cube
