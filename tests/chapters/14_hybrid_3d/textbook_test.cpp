// A step on the cluster `textbook`: the page's formula against the clock.

#include "tests/chapters/14_hybrid_3d/hybrid_support.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::hybrid {
namespace {

using namespace textbook;

/// A model whose messages take long relative to its products, and one whose
/// messages do not.
const std::pair<std::string, int> kModels[] = {
    {R"({"n_embd": 16, "n_layer": 6, "n_head": 4, "vocab_size": 40,
         "n_positions": 32})",
     32},
    {R"({"n_embd": 512, "n_layer": 10, "n_head": 8, "vocab_size": 30000,
         "n_positions": 512})",
     512}};

Report run(HybridOptions setup, const std::pair<std::string, int>& model,
           int steps = 3, DType dtype = DType::kF32) {
  Options options = mlp_options(ranks_of(setup),
                                setup.dp * setup.micro_batches *
                                    (setup.dp == 2 && setup.ep == 2 ? 3 : 2));
  std::tie(options.model, options.seq) = model;
  options.steps = steps;
  options.dtype = dtype;
  return train_on(options, setup);
}

void expect_form(const HybridOptions& setup, int steps = 3,
                 DType dtype = DType::kF32) {
  SCOPED_TRACE(name_of(setup) + ", " + std::to_string(steps) + " steps, " +
               dtype_name(dtype));
  for (const auto& model : kModels) {
    expect_closed_form(run(setup, model, steps, dtype));
  }
}

HybridOptions degrees(int d, int t, int p, int zero = 0) {
  HybridOptions setup;
  setup.dp = d, setup.tp = t, setup.pp = p, setup.zero_stage = zero;
  return setup;
}

// Stages of unequal work where 8 or 12 layers make 3 stages; with ZeRO-1,
// ranks begin every step after the first at different times.
TEST(HybridTextbook, AStepIsThePagesFormula) {
  for (const int p : {1, 2, 3}) {
    for (const int t : {1, 2}) {
      for (const int d : {1, 2}) {
        for (const int zero : {0, 1}) {
          HybridOptions setup = degrees(d, t, p, zero);
          expect_form(setup, t);
          setup.bucket_bytes = 20000;
          setup.micro_batches = 5;
          if (t == d) expect_form(setup, 2, DType::kBF16);
        }
      }
    }
  }
}

// A rank sums its gradients once its last message has arrived. The second rank
// has more to sum than the first, its receiver, and with ZeRO-1 it waits for
// more parameters.
TEST(HybridTextbook, MessagesArriveBeforeGradientsAreSummed) {
  const std::pair<std::string, int> model = {
      R"({"n_embd": 512, "n_layer": 6, "n_head": 4, "vocab_size": 256,
          "n_positions": 16})",
      16};
  for (const int zero : {0, 1}) {
    HybridOptions setup = degrees(3, 1, 4, zero);
    setup.schedule = "interleaved";
    expect_closed_form(run(setup, model));
  }
}

TEST(HybridTextbook, TokensCutOverTensorRanksTravelInHalves) {
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    for (const int zero : {0, 1}) {
      HybridOptions setup = degrees(2, 2, 2, zero);
      setup.sequence_parallel = true;
      setup.schedule = schedule;
      expect_form(setup);
    }
  }
}

TEST(HybridTextbook, BackwardsInTwoPartsHideNoSumOverTensorRanks) {
  for (const char* schedule : {"zb-h1", "zb-h2", "interleaved", "gpipe"}) {
    HybridOptions setup = degrees(1, 2, 2);
    setup.schedule = schedule;
    expect_form(setup);
  }
}

TEST(HybridTextbook, ForwardsRunAgainWithTheirMessages) {
  for (const char* recompute :
       {"always", "except_last", "blocks", "attention"}) {
    for (const char* schedule : {"1f1b", "zb-h1"}) {
      HybridOptions setup = degrees(1, 2, 2);
      setup.recompute = recompute;
      setup.schedule = schedule;
      expect_form(setup);
      setup.tp = 1, setup.cp = 2, setup.cp_kind = "ulysses";
      expect_form(setup);
    }
  }
}

TEST(HybridTextbook, SequencesCutOverRanksMeetStagesAndTensors) {
  for (const auto& [kind, layout] :
       {std::pair("ring", "contiguous"), std::pair("ring", "zigzag"),
        std::pair("rsa", "contiguous"), std::pair("ulysses", "contiguous")}) {
    for (const int c : {2, 4}) {
      HybridOptions setup = degrees(1, c == 2 ? 2 : 1, 2, 1);
      setup.cp = c, setup.cp_kind = kind, setup.cp_layout = layout;
      setup.schedule = c == 2 ? "zb-h1" : "1f1b";
      expect_form(setup, 2, DType::kBF16);
    }
  }
}

TEST(HybridTextbook, AStepWithExpertsIsThePagesFormula) {
  for (const int t : {1, 2}) {
    for (const int ep : {1, 2}) {
      for (const int zero : {0, 1}) {
        HybridOptions setup = degrees(2, t, 2, zero);
        setup.ep = ep, setup.experts = 8;
        setup.sequence_parallel = t == 2 && zero == 1;
        expect_form(setup);
        setup.top_k = 2, setup.capacity_factor = 1.5;
        setup.schedule = "zb-h1";
        expect_form(setup, 3, zero == 0 ? DType::kF32 : DType::kBF16);
      }
    }
  }
}

// From the second step on, each bucket leaves when it is full.
TEST(HybridTextbook, FullBucketsTravelDuringBackward) {
  const auto expect_overlap = [](HybridOptions setup) {
    setup.overlap_grad_reduce = true;
    for (const std::int64_t bytes :
         {std::int64_t{20000}, std::int64_t{1} << 21}) {
      setup.bucket_bytes = bytes;
      expect_form(setup, 2);
    }
  };
  for (const int p : {1, 2, 3}) {
    for (const int t : {1, 2}) {
      for (const int zero : {0, 1}) expect_overlap(degrees(2, t, p, zero));
    }
  }
  for (const char* schedule : {"zb-h1", "zb-auto", "interleaved", "gpipe"}) {
    for (const bool is_cut : {false, true}) {
      HybridOptions setup = degrees(2, 2, 2, 1);
      setup.schedule = schedule;
      setup.sequence_parallel = is_cut;
      expect_overlap(setup);
    }
    HybridOptions setup = degrees(2, 1, 1);
    if (schedule != std::string("interleaved")) setup.schedule = schedule;
    expect_overlap(setup);
  }
  for (const char* recompute : {"always", "blocks", "attention"}) {
    HybridOptions setup = degrees(1, 1, 2);
    setup.cp = 2, setup.cp_kind = "ulysses";
    setup.recompute = recompute;
    expect_overlap(setup);
  }
}

// Latencies keep the network busy from a stage's first full bucket on: the
// head's table on the last stage, the bias behind a sum on one between.
TEST(HybridTextbook, TheFirstFullBucketSetsTheEnd) {
  for (const auto& [p, partition] :
       {std::pair(2, "1,7"), std::pair(3, "1,6,1")}) {
    for (const bool is_cut : {false, true}) {
      HybridOptions setup = degrees(2, 2, p);
      setup.partition = partition;
      setup.sequence_parallel = is_cut;
      setup.bucket_bytes = 1, setup.overlap_grad_reduce = true;
      SCOPED_TRACE(name_of(setup));
      expect_closed_form(run(setup, kModels[0]));
    }
  }
}

// A step is shorter, but not the first one, which counts gradients.
TEST(HybridTextbook, OverlapHidesSumsBehindTheLastBackward) {
  HybridOptions setup = degrees(4, 1, 2);
  setup.bucket_bytes = 1 << 20;
  const double at_end = run(setup, kModels[1]).time.step_s;
  setup.overlap_grad_reduce = true;
  const double overlapped = run(setup, kModels[1]).time.step_s;
  EXPECT_LT(overlapped, at_end);
  EXPECT_NEAR(run(setup, kModels[1], 1).time.step_s / at_end, 1, 1e-9);
}

// Messages of shards and of tp travel at the same time. Large models have
// several buckets under ZeRO-2, for which there is no formula.
TEST(HybridTextbook, ZeroShardsWhatTensorRanksShare) {
  for (const bool cuts_tokens : {false, true}) {
    for (const char* recompute : {"never", "blocks"}) {
      HybridOptions setup = degrees(2, 2, 1, 3);
      setup.sequence_parallel = cuts_tokens;
      setup.recompute = recompute;
      expect_form(setup);
      setup.zero_stage = 2;
      expect_closed_form(run(setup, kModels[0]));
    }
  }
}

// The last stage of 1F1B holds one micro-batch of 2 * 16 tokens, and t = 2
// ranks share heads, hidden units and logits: a block keeps (4 + 12/2) h
// numbers and 5 statistics, the last norm 2 h and 2, the softmax 1, and V/2
// logits; beside them are the gradients of the loss and of the logits.
TEST(HybridPeak, IsWhatAStageKeepsAndTheLogitsGradient) {
  HybridOptions setup = degrees(1, 2, 2);
  setup.micro_batches = 2;
  const Report report = run(setup, {R"({"n_embd": 8, "n_layer": 2, "n_head": 2,
                    "vocab_size": 1024, "n_positions": 16})",
                                    16});
  EXPECT_EQ(report.ranks[3]
                .peak[static_cast<std::size_t>(MemoryKind::kActivation)]
                .counted,
            4 * (32 * (12 * 8 + 8 + 2 * 512) + 1));
}

// No form is given where none holds.
TEST(HybridTextbook, NoFormIsGivenWhereItDoesNotHold) {
  const auto form = [](const HybridOptions& setup) {
    return run(setup, kModels[0]).time.closed_form_s;
  };
  HybridOptions setup = degrees(1, 1, 2);
  setup.schedule = "dualpipe";
  EXPECT_LT(form(setup), 0);
  setup = degrees(1, 1, 1);
  setup.cp = 2, setup.cp_layout = "striped";
  EXPECT_LT(form(setup), 0);
  setup.cp_layout = "contiguous", setup.cp_kind = "rsa";
  EXPECT_LT(run(setup, kModels[0], 1).time.closed_form_s, 0);
  setup = degrees(1, 2, 1);
  setup.experts = 4, setup.expert_tp = true;
  EXPECT_LT(form(setup), 0);
  setup.expert_tp = false, setup.overlap_grad_reduce = true;
  EXPECT_LT(form(setup), 0);
}

}  // namespace
}  // namespace shardbook::hybrid
