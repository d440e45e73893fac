#include "chapters/10_tensor_parallel_3d/cube_strategy.h"

#include "chapters/08_tensor_parallel_2d/summa_strategy.h"
#include "chapters/10_tensor_parallel_3d/cube_layers.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::cube {

namespace {

ShardedModel sharded_model(const Options& options, const Cube& cube,
                           ProcessGroup& world) {
  const ModelConfig config = sharded_gpt_config(options);
  return {layers(cube, config.vocab_size),
          [all = summa::Parameters(config), l = cube.l()](
              const std::string& name, int rank) {
            return layout(all.of(name), place_of(rank, l));
          },
          padded_vocabulary(config.vocab_size, cube.l() * cube.l()),
          summa::sum_head_norms(config, world)};
}

}  // namespace

CubeStrategy::CubeStrategy(const Options& options, const Cube& cube,
                           ProcessGroup& group, const Passes& passes)
    : ShardedStrategy(summa::checked_parts(options, passes,
                                           {cube.l() * cube.l(), cube.l(),
                                            cube.l() * cube.l(), cube.l()}),
                      sharded_model(options, cube, group), group, passes),
      cube_(cube) {}

std::vector<Bill> CubeStrategy::bills() {
  Sizes s{sizes()};
  s.l = cube_.l();
  s.keep_gathered = cube_.keep_gathered;
  Bill bill = bill_of(parameters_per_rank(s), kept_bytes(s), step_bytes(s));
  if (textbook::is_chosen(options_)) bill.step_s = step_s(s);
  return {bill};
}

}  // namespace shardbook::cube
