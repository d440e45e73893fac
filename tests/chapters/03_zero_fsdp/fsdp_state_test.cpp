// State dicts: full, sharded, local; optimizer state by name.

#include <gtest/gtest.h>

#include "chapters/03_zero_fsdp/fsdp/state_dict.h"
#include "tests/chapters/03_zero_fsdp/fsdp_support.h"

namespace shardbook::fsdp_test {
namespace {

/// Full state after some steps, shared by the ranks of another world.
struct Saved {
  std::vector<NamedTensor> parameters;
  std::map<std::string, fsdp::ParameterState> optimizer;
  std::vector<StatePart> pieces;  // of all ranks
  std::vector<std::vector<NamedTensor>> local;
};

FsdpOptions linears(bool per_parameter = false) {
  return {.auto_wrap_policy = every_linear(), .per_parameter = per_parameter};
}

void train_steps(FullyShardedDataParallel& fsdp, Optimizer& optimizer, int d,
                 int first, int last) {
  for (int step = first; step < last; ++step) {
    const Samples mine =
        every(make_samples(24, DType::kF64, 10 + static_cast<unsigned>(step)),
              fsdp.group().rank(), d);
    mse_loss(fsdp(mine.x), mine.y).backward();
    optimizer.step();
    fsdp.clear_grad();
  }
}

Saved train_and_save(int d, const FsdpOptions& options) {
  Saved saved;
  saved.local.resize(static_cast<std::size_t>(d));
  std::vector<std::vector<StatePart>> pieces(static_cast<std::size_t>(d));
  on_ranks(d, [&](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    FullyShardedDataParallel fsdp(model, world, options);
    const auto adam = make_optimizer("adamw", fsdp.parameters(), {});
    train_steps(fsdp, *adam, d, 0, 3);
    const auto rank = static_cast<std::size_t>(world.rank());
    fsdp::FullStateDictOptions rank0;
    rank0.rank0_only = true;
    const auto full = full_state_dict(fsdp, rank0);
    EXPECT_EQ(full.empty(), rank != 0);
    const auto optim = full_optim_state_dict(fsdp, *adam, rank0);
    if (rank == 0) {
      saved.parameters = full;
      saved.optimizer = optim;
    }
    pieces[rank] = sharded_state_dict(fsdp);
    saved.local[rank] = local_state_dict(fsdp);
  });
  for (const auto& rank : pieces) {
    saved.pieces.insert(saved.pieces.end(), rank.begin(), rank.end());
  }
  return saved;
}

/// Parameters after six steps on d ranks, the last three of them continued from
/// `saved`, if there is one.
Values after_six_steps(int d, const FsdpOptions& options, const Saved* saved,
                       bool from_pieces = false) {
  return on_ranks(d, [&](ProcessGroup& world) {
    const bool resumes = saved != nullptr;
    Sequential model = make_mlp(DType::kF64, resumes ? 99 : 1);
    FullyShardedDataParallel fsdp(model, world, options);
    const auto adam = make_optimizer("adamw", fsdp.parameters(), {});
    if (resumes) {
      from_pieces ? load_sharded_state_dict(fsdp, saved->pieces)
                  : load_full_state_dict(fsdp, saved->parameters);
      load_full_optim_state_dict(fsdp, *adam, saved->optimizer);
    }
    train_steps(fsdp, *adam, d, resumes ? 3 : 0, 6);
    return whole_parameters(fsdp);
  })[0];
}

TEST(FsdpState, FourRanksContinueOnAnyNumberUnderAnyWrapping) {
  const Values want = after_six_steps(4, linears(), nullptr);
  FsdpOptions orig = linears();
  orig.use_orig_params = true;
  for (const bool rows : {false, true}) {
    const Saved saved = train_and_save(4, linears(rows));
    // The same ranks, bit for bit
    EXPECT_EQ(after_six_steps(4, linears(rows), &saved), want);
    for (const bool from_pieces : {false, true}) {
      for (const int d : {1, 2, 3, 4, 8}) {
        for (const FsdpOptions& options :
             {linears(), linears(true), FsdpOptions{}, orig}) {
          const Values resumed =
              after_six_steps(d, options, &saved, from_pieces);
          EXPECT_LT(largest_difference(resumed, want), 1e-12) << d;
        }
      }
    }
  }
}

TEST(FsdpState, AFullStateHasOriginalNamesAndShapesOnTheHost) {
  const Saved saved = train_and_save(3, linears());
  Sequential model = make_mlp(DType::kF64);
  const auto named = model.named_parameters();
  ASSERT_EQ(saved.parameters.size(), named.size());
  for (std::size_t i = 0; i < named.size(); ++i) {
    EXPECT_EQ(saved.parameters[i].name, named[i].name);
    EXPECT_EQ(saved.parameters[i].tensor.shape(), named[i].tensor.shape());
    EXPECT_EQ(saved.parameters[i].tensor.device().index(), -1);
    const auto& state = saved.optimizer.at(named[i].name);
    EXPECT_EQ(state.step, 3);
    EXPECT_EQ(state.state[0].name, "exp_avg");
    EXPECT_EQ(state.state[1].tensor.shape(), named[i].tensor.shape());
  }
}

// The trap: units of one wrapping loaded in the order of another.
TEST(FsdpState, OptimizerStateByIndexWouldBelongToOtherParameters) {
  const Saved one = train_and_save(2, FsdpOptions{});
  const Saved many = train_and_save(2, linears());
  EXPECT_LT(largest_difference(after_six_steps(2, linears(), &one),
                               after_six_steps(2, linears(), &many)),
            1e-12);
  Saved shifted = many;
  std::swap(shifted.optimizer.at("2.bias"), shifted.optimizer.at("0.bias"));
  EXPECT_ANY_THROW(after_six_steps(2, linears(), &shifted));
}

TEST(FsdpState, MissingPiecesAreNamed) {
  Saved saved = train_and_save(3, linears());
  saved.pieces.erase(saved.pieces.begin());
  const std::string error = error_on_ranks(2, [&](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    FullyShardedDataParallel fsdp(model, world);
    load_sharded_state_dict(fsdp, saved.pieces);
  });
  expect_text(error, {"the state has no element 0 of '0.weight'"});
}

TEST(FsdpState, ALocalStateLoadsWhereItWasMadeOnly) {
  const Saved saved = train_and_save(4, linears());
  auto load = [&](int d, const FsdpOptions& options) {
    return error_on_ranks(d, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF64, 99);
      FullyShardedDataParallel fsdp(model, world, options);
      load_local_state_dict(
          fsdp, saved.local[static_cast<std::size_t>(world.rank())]);
      Tensors want;
      for (const NamedTensor& p : saved.parameters) want.push_back(p.tensor);
      EXPECT_EQ(whole_parameters(fsdp), values_of(want));
    });
  };
  EXPECT_EQ(load(4, linears()), "");
  expect_text(load(2, linears()), {"local state"});
  expect_text(load(4, FsdpOptions{}), {"local state"});
}

}  // namespace
}  // namespace shardbook::fsdp_test
