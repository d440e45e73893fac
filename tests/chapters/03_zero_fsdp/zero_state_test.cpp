// The training state by name: whole, in shards, and on other ranks and stages.

#include <gtest/gtest.h>

#include <filesystem>

#include "chapters/03_zero_fsdp/zero/zero_checkpoint.h"
#include "tests/chapters/03_zero_fsdp/zero_support.h"
#include "tests/support/temp_folder.h"

namespace shardbook::zero_test {
namespace {

using zero::load_sharded;
using zero::save_sharded;
using zero::ShardPiece;

Training run_of(const std::string& optimizer, DType dtype = DType::kF64) {
  Training run;
  run.optimizer = optimizer;
  if (optimizer == "sgd") run.how = momentum_sgd();
  run.dtype = dtype;
  run.steps = 4;
  return run;
}

/// Trains on data that do not depend on the number of ranks: every rank sees
/// all samples, and the sum of two or four equal shares is exact.
void train_on_all(ZeroOptimizer& zero, const Training& run, int first,
                  int last) {
  for (int step = first; step < last; ++step) {
    const Samples all =
        make_samples(6, run.dtype, 30 + static_cast<std::uint64_t>(step));
    backward_of(zero(all.x), all, 1);
    zero.step();
  }
}

State run_and_save(int d, int number, const Training& run,
                   const std::string& folder, int steps) {
  return on_ranks(d, [&](ProcessGroup& world) {
    Sequential model = make_mlp(run.dtype);
    const auto zero =
        make_zero(model, world, stage(number), run.optimizer, run.how);
    train_on_all(*zero, run, 0, steps);
    if (!folder.empty()) save_sharded(*zero, folder);
    return state_of_zero(*zero);
  })[0];
}

State load_and_run(int d, int number, const Training& run,
                   const std::string& folder, int first, int last) {
  return on_ranks(d, [&](ProcessGroup& world) {
    // Other weights than those that were saved
    Sequential model = make_mlp(run.dtype, 77);
    ZeroOptions options = stage(number);
    options.persistence_threshold = 7;
    const auto zero = make_zero(model, world, options, run.optimizer, run.how);
    load_sharded(*zero, folder);
    EXPECT_EQ(zero->steps_done(), first);
    train_on_all(*zero, run, first, last);
    return state_of_zero(*zero);
  })[0];
}

// [BIT] d = 4 continues on 2 and on 1, and from any stage in any other.
TEST(ZeroState, AnyWorldGoesOnIdentically) {
  for (const std::string optimizer : {"sgd", "adam", "adamw"}) {
    const Training run = run_of(optimizer);
    for (int from = 1; from <= 3; ++from) {
      const TempFolder temporary;
      const std::string& folder = temporary.path();
      const State straight = run_and_save(4, from, run, "", 4);
      run_and_save(4, from, run, folder, 2);
      for (const auto& [d, to] : {std::pair(2, 1), std::pair(1, 2),
                                  std::pair(2, 3), std::pair(4, from)}) {
        EXPECT_EQ(
            first_difference(load_and_run(d, to, run, folder, 2, 4), straight),
            "")
            << optimizer << ", stage " << from << " on 4 to stage " << to
            << " on " << d;
      }
      // [RED] Sums of 3 or 8 shares round
      for (const int d : {3, 8}) {
        EXPECT_LT(
            largest_difference(load_and_run(d, 3, run, folder, 2, 4), straight),
            1e-12);
      }
    }
  }
}

TEST(ZeroState, MasterCopiesComeAlong) {
  const Training run = run_of("adam", DType::kBF16);
  const TempFolder temporary;
  const std::string& folder = temporary.path();
  const State straight = run_and_save(4, 2, run, "", 4);
  ASSERT_EQ(straight.count("0.weight.master"), 1u);
  run_and_save(4, 2, run, folder, 2);
  EXPECT_EQ(first_difference(load_and_run(2, 3, run, folder, 2, 4), straight),
            "");
}

// Trap: without the optimizer's state the parameters alone go on differently.
TEST(ZeroStateTrap, ParametersAloneAreNotTheState) {
  const Training run = run_of("adam");
  const auto states = on_ranks(2, [&](ProcessGroup& world) {
    Sequential model = make_mlp(run.dtype);
    const auto zero = make_zero(model, world, stage(2), "adam", run.how);
    train_on_all(*zero, run, 0, 2);
    const std::vector<NamedTensor> parameters = zero->full_parameters();
    train_on_all(*zero, run, 2, 4);

    Sequential again = make_mlp(run.dtype, 77);
    again.load_values(parameters);
    const auto fresh = make_zero(again, world, stage(2), "adam", run.how);
    train_on_all(*fresh, run, 2, 4);
    return std::pair(state_of_zero(*zero), state_of_zero(*fresh));
  });
  EXPECT_GT(largest_difference(states[0].first, states[0].second), 1e-4);
}

TEST(ZeroState, ShardsWithoutPaddingAreTheModel) {
  for (int number = 1; number <= 3; ++number) {
    const auto ranks = on_ranks(3, [&](ProcessGroup& world) {
      Sequential model = make_184(DType::kF32);
      Sequential whole = make_184(DType::kF32);
      const auto zero = make_zero(model, world, stage(number), "adam", {});
      std::map<std::string, Tensor> by_name;
      for (const auto& [name, tensor] : whole.named_parameters()) {
        by_name[name] = tensor;
      }
      std::int64_t numel = 0;
      bool all_equal = true;
      for (const ShardPiece& piece : zero->shards()) {
        const Tensor& tensor = by_name.at(piece.name);
        all_equal =
            all_equal && piece.shape == tensor.shape() &&
            bitwise_equal(piece.values,
                          tensor.flat_view(piece.begin, piece.values.shape()));
        numel += piece.values.numel();
      }
      return std::pair(all_equal, numel);
    });
    std::int64_t total = 0;
    for (const auto& [all_equal, numel] : ranks) {
      EXPECT_TRUE(all_equal) << "stage " << number;
      total += numel;
    }
    EXPECT_EQ(total, 184);
  }
}

TEST(ZeroState, RankZeroAloneMayKeepTheWholeTensors) {
  for (int number = 1; number <= 3; ++number) {
    const auto counts = on_ranks(3, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF32);
      ZeroOptions options = stage(number);
      options.allgather_bucket_size = 10;  // many small gathers
      const auto zero = make_zero(model, world, options, "adam", {});
      train_zero(*zero, Training(), 0, 1);
      const auto parameters = zero->full_parameters(/*rank0_only=*/true);
      const auto state = zero->full_optimizer_state(/*rank0_only=*/true);
      bool on_host = true;
      for (const auto& [name, tensor] : parameters) {
        on_host = on_host && tensor.device() == RankContext::current().host();
      }
      return std::tuple(parameters.size(), state.size(), on_host);
    });
    EXPECT_EQ(counts[0], std::tuple(6u, 12u, true)) << "stage " << number;
    EXPECT_EQ(counts[1], std::tuple(0u, 0u, true)) << "stage " << number;
  }
}

// --- Broken checkpoints
// -------------------------------------------------------

std::string load_error(const std::string& folder, const Training& run,
                       std::int64_t width = 7) {
  return error_on_ranks(1, [&](ProcessGroup& world) {
    const InitOptions init = init_of(run.dtype);
    Sequential model;
    model.add(Linear("0", 5, width, init));
    const auto zero = make_zero(model, world, stage(2), "adam", run.how);
    load_sharded(*zero, folder);
  });
}

TEST(ZeroState, ABrokenCheckpointIsNamed) {
  namespace fs = std::filesystem;
  const Training run = run_of("adam");
  const TempFolder temporary;
  const std::string& folder = temporary.path();
  EXPECT_TRUE(has_text(load_error(folder + "/none", run), "cannot be read"));
  EXPECT_TRUE(has_text(load_error(folder, run), "holds no zero-"));
  run_and_save(2, 2, run, folder, 1);
  EXPECT_EQ(load_error(folder, run), "");

  // Another shape, a missing file, files of two checkpoints
  EXPECT_TRUE(has_text(load_error(folder, run, 8),
                       "has shape [5, 7], the model needs [5, 8]"))
      << load_error(folder, run, 8);
  const std::string second = folder + "/zero-00002-of-00002.safetensors";
  fs::rename(second, folder + "/kept");
  EXPECT_TRUE(has_text(load_error(folder, run),
                       "was written by 2 ranks, " + folder + " holds 1"));
  fs::rename(folder + "/kept", second);
  const TempFolder other;
  run_and_save(2, 2, run, other.path(), 2);
  fs::copy_file(other / "zero-00002-of-00002.safetensors", second,
                fs::copy_options::overwrite_existing);
  EXPECT_TRUE(has_text(load_error(folder, run), "after another step"));
}

TEST(ZeroState, AMissingPartIsNamed) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    const auto zero = make_zero(model, world, stage(3), "adam", {});
    std::vector<ShardPiece> pieces = zero->shards();  // this rank's alone
    Sequential other_model = make_mlp(DType::kF64);
    ZeroOptions one = stage(1);
    const auto other = make_zero(other_model, world, one, "adam", {});
    other->load_shards(pieces, 0);
  });
  EXPECT_TRUE(has_text(error, "no piece of '")) << error;
}

}  // namespace
}  // namespace shardbook::zero_test
