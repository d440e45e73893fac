// After an exception, every strategy recovers, or refuses and gives the reason:
// in forward, backward, step and gather.

#include <gtest/gtest.h>

#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "tests/chapters/03_zero_fsdp/zero_support.h"
#include "tests/support/errors.h"

namespace shardbook::zero_test {
namespace {

using fsdp::FullyShardedDataParallel;

/// Returns its input; throws once, at the place that a test sets.
struct Fuse {
  bool in_forward = false;
  bool in_backward = false;
};

class Fused : public ModuleOf<Fused> {
 public:
  explicit Fused(std::shared_ptr<Fuse> fuse) : fuse_(std::move(fuse)) {}
  Tensor forward(const Tensor& x) override {
    if (std::exchange(fuse_->in_forward, false)) SB_FAIL("forward: blown");
    return autograd::custom_function(
        "fused", {x}, [](const Tensors& inputs) { return inputs; },
        [fuse = fuse_](const Tensors& grads) {
          if (std::exchange(fuse->in_backward, false)) {
            SB_FAIL("backward: blown");
          }
          return grads;
        })[0];
  }
  void members(MemberVisitor&) override {}

 private:
  std::shared_ptr<Fuse> fuse_;
};

/// Two layers with a fuse between them: a unit.
class Block : public ModuleOf<Block> {
 public:
  Block(const std::string& name, std::int64_t in, std::int64_t out,
        const std::shared_ptr<Fuse>& fuse)
      : first(name + ".first", in, 8, init_of(DType::kF64)),
        fused(fuse),
        second(name + ".second", 8, out, init_of(DType::kF64)) {}
  Tensor forward(const Tensor& x) override {
    return second(fused(relu(first(x))));
  }
  void members(MemberVisitor& visit) override {
    visit.module("first", first);
    visit.module("fused", fused);
    visit.module("second", second);
  }
  std::string type_name() const override { return "Block"; }
  Linear first;
  Fused fused;
  Linear second;
};

/// A layer of the root, a block that may throw, and one that does not.
class Net : public ModuleOf<Net> {
 public:
  explicit Net(const std::shared_ptr<Fuse>& fuse)
      : head("head", 5, 6, init_of(DType::kF64)),
        block("block", 6, 7, fuse),
        last("last", 7, 3, std::make_shared<Fuse>()) {}
  Tensor forward(const Tensor& x) override {
    return last(relu(block(relu(head(x)))));
  }
  void members(MemberVisitor& visit) override {
    visit.module("head", head);
    visit.module("block", block);
    visit.module("last", last);
  }
  Linear head;
  Block block, last;
};

/// A small net under one of the strategies, with AdamW.
class Sharded {
 public:
  Sharded(const std::string& strategy, ProcessGroup& world)
      : fuse(std::make_shared<Fuse>()), world_(world), net_(fuse) {
    OptimizerOptions optimizer_options;
    optimizer_options.weight_decay = 0.1;
    if (strategy[0] == 'z') {
      ZeroOptions options = stage(strategy.back() - '0');
      options.unit_types = {"Block"};
      options.reduce_bucket_size = 60;
      options.persistence_threshold = 8;
      options.allgather_bucket_size = 40;
      zero = make_zero(net_, world, options, "adamw", optimizer_options);
      return;
    }
    fsdp::FsdpOptions options;
    options.auto_wrap_policy = fsdp::transformer_auto_wrap_policy({"Block"});
    options.per_parameter = strategy == "fsdp2";
    fsdp = std::make_unique<FullyShardedDataParallel>(net_, world, options);
    optimizer_ = make_optimizer("adamw", fsdp->parameters(), optimizer_options);
  }

  /// Micro-batch `micro` of 2.
  void backward(int step, int micro) {
    if (zero) zero->set_boundary(micro == 1);
    const Samples mine =
        every(make_samples(4 * world_.size(), DType::kF64,
                           static_cast<std::uint64_t>(10 + step)),
              2 * world_.rank() + micro, 2 * world_.size());
    const Tensor loss =
        mse_loss(zero ? (*zero)(mine.x) : (*fsdp)(mine.x), mine.y);
    autograd::backward({loss}, {Tensor::full({}, 0.5, loss.options())});
  }
  void update() {
    if (zero) {
      zero->step();
      return;
    }
    fsdp->clip_grad_norm_(1e9);
    optimizer_->step();
    fsdp->clear_grad();
  }
  void step(int step) {
    backward(step, 0);
    backward(step, 1);
    update();
  }
  void clear_grad() { zero ? zero->clear_grad() : fsdp->clear_grad(); }

  Values values() {
    if (zero) {
      Tensors whole;
      for (const NamedTensor& p : zero->full_parameters()) {
        whole.push_back(p.tensor);
      }
      return values_of(whole);
    }
    const auto scope = fsdp->summon_full_params(/*writeback=*/false);
    return values_of(net_.parameters());
  }

  std::shared_ptr<Fuse> fuse;

 private:
  ProcessGroup& world_;
  Net net_;  // outlives the module that holds its layers

 public:
  std::unique_ptr<ZeroOptimizer> zero;
  std::unique_ptr<FullyShardedDataParallel> fsdp;

 private:
  std::unique_ptr<Optimizer> optimizer_;
};

class Failure : public testing::TestWithParam<const char*> {
 protected:
  /// The parameters after `body` on two ranks, with `capacity` bytes each.
  Values after(const std::function<void(Sharded&)>& body,
               std::int64_t capacity = 0) {
    return on_ranks(2, [&](ProcessGroup& world) {
      RankContext context(Device::cpu(world.rank(), capacity), world.rank(), 1);
      context.deterministic = true;
      RankContext::Scope scope(context);
      Sharded sharded(GetParam(), world);
      body(sharded);
      return sharded.values();
    })[0];
  }
  Values undisturbed() {
    return after([](Sharded& sharded) {
      for (int k = 0; k < 3; ++k) sharded.step(k);
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Strategies, Failure,
                         testing::Values("zero1", "zero2", "zero3", "fsdp",
                                         "fsdp2"));

TEST_P(Failure, AForwardThatThrewIsRunAgainAsIfNothingHadBeen) {
  const Values got = after([](Sharded& sharded) {
    sharded.step(0);
    sharded.fuse->in_forward = true;
    expect_text(error_of([&] { sharded.step(1); }), {"blown"});
    sharded.step(1);
    sharded.backward(2, 0);
    sharded.fuse->in_forward = true;
    expect_text(error_of([&] { sharded.backward(2, 1); }), {"blown"});
    sharded.backward(2, 1);
    sharded.update();
  });
  EXPECT_EQ(got, undisturbed());
}

// The units that the forward had gathered are older than the update.
TEST_P(Failure, AnUpdateAfterAForwardThatThrewIsSeenByTheNextForward) {
  auto run = [&](bool throws) {
    return after([throws](Sharded& sharded) {
      for (int k = 0; k < 3; ++k) {
        sharded.backward(k, 1);
        sharded.fuse->in_forward = throws;
        if (throws) {
          expect_text(error_of([&] { sharded.backward(k, 0); }), {"blown"});
        }
        sharded.update();
      }
    });
  };
  EXPECT_EQ(run(true), run(false));
}

TEST_P(Failure, ABackwardThatThrewIsRefusedUntilItsGradientsAreCleared) {
  const Values got = after([](Sharded& sharded) {
    sharded.step(0);
    for (int micro = 0; micro < 2; ++micro) {
      // In either micro-batch, after some gradients have been reduced
      if (micro == 1) sharded.backward(1, 0);
      sharded.fuse->in_backward = true;
      expect_text(error_of([&] { sharded.backward(1, micro); }), {"blown"});
      const std::string reason = "after a backward that failed";
      expect_error([&] { sharded.backward(1, micro); }, {"forward " + reason});
      expect_error([&] { sharded.update(); }, {reason, "clear_grad()"});
      sharded.clear_grad();
    }
    sharded.step(1);
    sharded.step(2);
  });
  EXPECT_EQ(got, undisturbed());
}

/// Allocates all memory of the device except `left` bytes.
Tensor take_memory(std::int64_t capacity, std::int64_t left) {
  const MemoryStats memory = RankContext::current().device.memory();
  return Tensor::empty({(capacity - memory.current_total - left) / 8},
                       {DType::kF64, Device()});
}

TEST_P(Failure, AGatherWithoutMemoryIsMadeAgain) {
  constexpr std::int64_t kCapacity = 1 << 20;
  const Values got = after(
      [](Sharded& sharded) {
        sharded.step(0);
        {
          const Tensor taken = take_memory(kCapacity, 500);
          expect_error([&] { sharded.backward(1, 0); }, {"out of memory"});
        }
        sharded.step(1);
        sharded.step(2);
      },
      kCapacity);
  EXPECT_EQ(got, undisturbed());
}

TEST_P(Failure, AStepThatThrewIsRunAgainOrRefused) {
  constexpr std::int64_t kCapacity = 1 << 20;
  const Values got = after(
      [](Sharded& sharded) {
        sharded.step(0);
        TrainingState state;
        Tensors saved;
        if (sharded.zero) {
          state = sharded.zero->state();
          for (const StatePart& part : state.parts) {
            for (const StateField& each : fields_of(part)) {
              saved.push_back(each.values.clone());
            }
          }
        }
        sharded.backward(1, 0);
        sharded.backward(1, 1);
        std::string error;
        {
          // Enough for the norm, not for the new parameters
          const Tensor taken = take_memory(kCapacity, sharded.zero ? 64 : 0);
          error = error_of([&] { sharded.update(); });
        }
        expect_text(error, {"out of memory"});
        if (!sharded.zero) {
          sharded.update();  // clipping threw: nothing was updated
        } else {
          expect_error([&] { sharded.update(); },
                       {"step after a step that failed"});
          expect_text(error_of([&] { sharded.backward(1, 0); }),
                      {"load a checkpoint"});
          auto next = saved.begin();
          for (const StatePart& part : state.parts) {
            make_optimizer_state(part, 1);
            for (const StateField& each : fields_of(part)) {
              const NoGrad no_grad;
              each.values.copy_from(*next++);
            }
          }
          state.loaded({});
          sharded.step(1);
        }
        sharded.step(2);
      },
      kCapacity);
  EXPECT_EQ(got, undisturbed());
}

// The graph of a forward without a backward is discarded.
TEST_P(Failure, AForwardWithoutABackwardLeavesNothingBehind) {
  const Values got = after([](Sharded& sharded) {
    for (int k = 0; k < 3; ++k) {
      sharded.backward(k, 0);
      sharded.backward(k, 1);
      const Samples other = make_samples(4, DType::kF64, 99);
      sharded.zero ? (*sharded.zero)(other.x) : (*sharded.fsdp)(other.x);
      sharded.update();
    }
  });
  EXPECT_EQ(got, undisturbed());
}

TEST(FsdpFailure, SummoningWithoutMemoryLeavesTheModelInShards) {
  constexpr std::int64_t kCapacity = 1 << 20;
  on_ranks(2, [](ProcessGroup& world) {
    RankContext context(Device::cpu(world.rank(), kCapacity), world.rank(), 1);
    RankContext::Scope scope(context);
    Sharded sharded("fsdp", world);
    const Values before = sharded.values();
    {
      const Tensor taken = take_memory(kCapacity, 500);
      expect_text(error_of([&] { sharded.values(); }), {"out of memory"});
    }
    EXPECT_EQ(sharded.values(), before);
  });
}

}  // namespace
}  // namespace shardbook::zero_test
