#pragma once

// What the notebooks 07_tensor_parallel, 11_dtensor and 12_sequence_parallel
// call: matrices and sequences and their parts, changes of layout and products,
// attention in blocks, runs on ranks and on shapes, and tables of their results.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "chapters/07_tensor_parallel/mappings.h"
#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/11_dtensor/dtensor.h"
#include "chapters/11_dtensor/dtensor_ops.h"
#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/11_dtensor/redistribute.h"
#include "chapters/12_sequence_parallel/bill.h"
#include "chapters/12_sequence_parallel/ring_exchange.h"
#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "chapters/pictures/figure.h"
#include "chapters/programs/programs.h"
#include "comm/device_mesh.h"
#include "core/attention_block.h"
#include "core/ops.h"
#include "notebooks/lessons.h"
#include "notebooks/live_ranks.h"

namespace notes {

using namespace shardbook::notebook;
namespace sp = shardbook::sequence_parallel;

// --- Tensor parallelism ------------------------------------------------------

/// A parameter of a GPT as the chapter's layers cut it.
inline dtensor::Held parameter_of(const std::string& name, const Shape& shape,
                                  int t) {
  return dtensor::held_by(name, shape, t, [&](int rank) {
    return tensor_parallel::layout(ModelConfig(), name, rank, t);
  });
}

/// This rank's equal part along `dim`.
inline Tensor part_of(const Tensor& whole, std::int64_t dim,
                      ProcessGroup& world) {
  return take_part(whole, {{dim, world.rank(), world.size()}});
}

/// A GPT of 1.3 billion parameters on the shapes of machines of eight A100.
inline const std::string kLarge =
    " --backend sim --cluster selene --model gpt-1.3b --dtype bf16 "
    "--data random --batch 8 --seq 1024 --steps 2";

inline Report train(int t, const std::string& options) {
  return run(joined("07_tensor_parallel --world-size ", t, options));
}

/// A bar for each number of ranks.
inline Picture step_times(const std::vector<int>& sizes) {
  const auto bar_of = [](int t) {
    const Report report = train(t, kLarge);
    const double gb = report.ranks[0].peak_total.counted / 1e9;
    return Bar{joined("t = ", t), step_s(report), 0,
               ms(step_s(report), 1) + ", " + fixed(gb, 1) + " GB"};
  };
  return bars("Beyond eight ranks, twice as many gain little",
              mapped(sizes, bar_of), {"ms", 1e-3});
}

/// The exposed share of a step on 8 ranks of `textbook`, by width and samples.
inline Picture exposed_shares(const std::vector<int>& widths,
                              const std::vector<int>& samples) {
  Rows rows = {{"width"}};
  for (const int batch : samples) {
    rows[0].push_back(joined(1024 * batch, " tokens"));
  }
  for (const int width : widths) {
    rows.push_back(cells(width));
    for (const int batch : samples) {
      const Report report = train(
          8, joined(kLarge, " --cluster textbook --dtype f32 --batch ", batch,
                    R"( --model '{"n_layer": 24, "n_head": 32, )"
                    R"("vocab_size": 50304, "n_positions": 2048, "n_embd": )",
                    width, "}'"));
      rows.back().push_back(percent(exposed_share(report), 0));
    }
  }
  return table(rows);
}

// --- Layouts -----------------------------------------------------------------

/// Which ranks of a mesh hold which parts of a matrix, for several layouts.
inline Picture layouts(const Shape& shape,
                       const std::vector<dtensor::Placements>& all,
                       const Shape& mesh) {
  return holders("The second axis cuts what the first one leaves",
                 mapped(all, [&](const dtensor::Placements& each) {
                   return dtensor::held_by("x", shape, each, mesh);
                 }));
}

// --- Changes of layout -------------------------------------------------------

/// Whole, cut by rows, cut by columns.
inline const dtensor::Placements kThree = {
    dtensor::replicate(), dtensor::shard(0), dtensor::shard(1)};

/// The calls that turn `from` into `to` on four ranks.
inline std::vector<dtensor::Call> calls_between(const dtensor::Placement& from,
                                                const dtensor::Placement& to,
                                                const Shape& shape) {
  return dtensor::calls_of({from}, {to}, shape, /*mesh=*/{4}, {0});
}

/// The collective of each change of an 8 x 8 matrix on four ranks.
inline Picture changes() {
  const auto row = [](const dtensor::Placement& from) {
    Cells row = {dtensor::text(from)};
    for (const dtensor::Placement& to : kThree) {
      const auto calls = calls_between(from, to, {8, 8});
      std::string text;
      for (const dtensor::Call& call : calls) {
        text += joined(comm_op_name(call.op), " ");
      }
      text += fixed(dtensor::wire_elements(calls, {4}), 0);
      row.push_back(calls.empty() ? "-" : text);
    }
    return row;
  };
  dtensor::Placements all = kThree;
  all.push_back(dtensor::partial());
  return table_of({"from", "to R", "to S(0)", "to S(1)"}, all, row);
}

/// A layout, what a rank sent for it, and how far its values are from those of
/// one device.
struct Result {
  std::string layout = "";
  double elements = 0, difference = 0;
};

inline std::string text_of(const Result& result) {
  return "difference " + fixed(result.difference, 6) + ", " +
         fixed(result.elements, 0) + " elements sent per rank\n";
}

// --- Products ----------------------------------------------------------------

/// Every pair of layouts of X and W on two ranks.
/// product(world, x, w) is the Result.
template <typename Product>
Picture products(const Product& product) {
  const auto row = [&](const dtensor::Placement& x) {
    Cells row = {dtensor::text(x)};
    double largest = 0;
    for (const dtensor::Placement& w : kThree) {
      const Result result = on_ranks(2, product, x, w)[0];
      largest = std::max(largest, result.difference);
      row.push_back(result.layout + ", " + fixed(result.elements, 0));
    }
    row.push_back(largest < 1e-12 ? "yes" : "NO");
    return row;
  };
  return table_of({"X", "W R", "W S(0)", "W S(1)", "all equal"}, kThree, row);
}

// --- Plans for an MLP --------------------------------------------------------

/// Y = gelu(X W1) W2 on one device, with the gradients of the sum of squares.
struct Mlp {
  Tensor x, w1, w2, y;
};

inline Mlp one_device(std::int64_t tokens) {
  Mlp mlp;
  mlp.x = numbers({tokens, 16}, "x");
  mlp.w1 = numbers({16, 64}, "w1");
  mlp.w2 = numbers({64, 16}, "w2");
  mlp.w1.set_requires_grad();
  mlp.w2.set_requires_grad();
  mlp.y = matmul(gelu(matmul(mlp.x, mlp.w1)), mlp.w2);
  sum(square(mlp.y)).backward();
  return mlp;
}

struct Plan {
  double elements = 0;      ///< forward and backward
  double weight_share = 0;  ///< of both weights, on a rank
  double difference = 0;    ///< of Y and of the gradients
};

/// The largest difference, as a part of the largest number.
inline double relative(const Tensor& x, const Tensor& right) {
  return max_abs_difference(x, right) /
         max_abs_difference(right, right.zeros_like());
}

inline Tensor whole_gradient(const dtensor::Parameter& p) {
  return dtensor::from_local(p.local.grad(), p.mesh, p.placements, p.shape)
      .full_tensor();
}

/// After backward: what was sent, and what differs from one device.
inline Plan compare(ProcessGroup& world, const Mlp& mlp,
                    const dtensor::Parameter& w1, const dtensor::Parameter& w2,
                    const dtensor::DTensor& y) {
  Plan plan;
  plan.elements = sent_elements(world.records());
  plan.weight_share = double(w1.local.numel() + w2.local.numel()) /
                      double(mlp.w1.numel() + mlp.w2.numel());
  plan.difference = std::max({relative(y.full_tensor(), mlp.y),
                              relative(whole_gradient(w1), mlp.w1.grad()),
                              relative(whole_gradient(w2), mlp.w2.grad())});
  return plan;
}

/// Nine plans on four ranks: try_plan(world, mlp, w1, w2) is the Plan.
template <typename TryPlan>
Picture plans(std::int64_t tokens, const TryPlan& try_plan) {
  const auto run = [&](ProcessGroup& world, const dtensor::Placement& w1,
                       const dtensor::Placement& w2) {
    return try_plan(world, one_device(tokens), w1, w2);
  };
  Rows rows = mapped(kThree, kThree, [&](const auto& w1, const auto& w2) {
    const Plan plan = on_ranks(4, run, w1, w2)[0];
    return Cells{dtensor::text(w1), dtensor::text(w2), fixed(plan.elements, 0),
                 percent(plan.weight_share, 0),
                 plan.difference < 1e-12 ? "yes" : "NO"};
  });
  rows.insert(rows.begin(),
              {"W1", "W2", "elements sent", "weights on a rank", "equal"});
  return table(rows);
}

// --- Whole trainings ---------------------------------------------------------

/// GPT 1.3B on the shapes of 8 ranks of `textbook`: exposed communication with
/// all ranks on tp, where tokens move, and on dp, where weights move.
inline Picture tokens_or_weights(const std::vector<std::int64_t>& tokens) {
  const auto bar_of = [](std::int64_t each, const std::string& mesh) {
    const std::string line = joined(
        "11_dtensor --model gpt-1.3b --world-size 8 --batch 8 --no-check",
        kTextbook, " --mesh ", mesh, " --seq ", each / 8);
    return Bar{joined(each, " tokens, ", mesh == "1x8" ? "tp" : "fsdp"),
               exposed_s(run(line))};
  };
  return bars("Few tokens: move the tokens. Many: move the weights",
              mapped(tokens, Cells{"1x8", "8x1"}, bar_of), {"ms", 1e-3},
              "comm");
}

// --- Answers of the exercises ------------------------------------------------

/// Of [7, 5] with (S(0), S(0)) on 2 x 3 ranks.
inline double rank_with_nothing() {
  for (int rank = 0; rank < 6; ++rank) {
    const dtensor::Block block =
        dtensor::local_part({7, 5}, {dtensor::shard(0), dtensor::shard(0)},
                            {2, 3}, {rank / 3, rank % 3});
    if (shape_numel(block.shape) == 0) return rank;
  }
  return -1;
}

// --- Which rank has which tokens ---------------------------------------------

/// The causal mask of s tokens. A row has the colour of its query's rank.
inline Picture mask(sp::Layout layout, int c, std::int64_t s) {
  const double cell = 12;
  pictures::Figure figure("A causal mask in the colours of the ranks", 480);
  const double top = figure.add_row(cell * static_cast<double>(s));
  Picture picture;
  for (int rank = 0; rank < c; ++rank) {
    const std::string color = pictures::rank_color(rank);
    std::string tokens = joined("rank ", rank, ":");
    for (const std::int64_t query : sp::positions(layout, rank, c, s)) {
      tokens += joined(" ", query);
      for (std::int64_t key = 0; key <= query; ++key) {
        figure.box(
            {cell * static_cast<double>(key),
             top + cell * static_cast<double>(query), cell - 1, cell - 1},
            color);
      }
    }
    figure.text(cell * static_cast<double>(s) + 20, top + 14 + 20 * rank,
                tokens, pictures::Figure::Anchor::kStart, color);
    picture.text += tokens + "\n";
  }
  picture.svg = figure.svg(picture.text);
  return picture;
}

/// Pairs that each rank computes by step, the most of each step, and sums.
inline Picture pairs_table(sp::Layout layout, int c, std::int64_t s) {
  Rows rows = {{"step"}};
  std::vector<double> sums(static_cast<std::size_t>(c) + 1);
  for (int rank = 0; rank < c; ++rank) rows[0].push_back(joined("rank ", rank));
  rows[0].push_back("most");
  for (int step = 0; step < c; ++step) {
    std::vector<double> pairs;
    for (int rank = 0; rank < c; ++rank) {
      pairs.push_back(sp::visible_pairs(
          layout, rank, sp::source_at(rank, step, c), c, s / c));
    }
    pairs.push_back(*std::max_element(pairs.begin(), pairs.end()));
    rows.push_back(cells(step));
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      rows.back().push_back(fixed(pairs[i], 0));
      sums[i] += pairs[i];
    }
  }
  rows.push_back({"all"});
  for (const double sum : sums) rows.back().push_back(fixed(sum, 0));
  return table(rows);
}

// --- Attention in blocks -----------------------------------------------------

/// Normal numbers [1, 32, 8] that depend on the name alone: two heads of four.
inline Tensor sequence(const std::string& name) {
  return numbers({1, 32, 8}, name);
}

/// Every query sees every key.
inline AttentionOptions two_heads() {
  AttentionOptions options;
  options.heads = 2;
  options.causal = false;
  return options;
}

/// Output and logarithms of sums of these queries over these keys and values.
inline AttentionSums attend(const Tensor& q, const Tensors& keys_values) {
  AttentionBlock block;
  block.queries = {0, q.size(1)};
  block.keys = {0, keys_values[0].size(1)};
  return attention_block(q, keys_values[0], keys_values[1], block, two_heads(),
                         next_attention_draws());
}

/// Eight tokens as rows, four heads of two as columns.
inline Picture before_and_after(int c) {
  const auto by_tokens = [c](int rank) { return Shards{{0, rank, c}}; };
  const auto by_heads = [c](int rank) { return Shards{{1, rank, c}}; };
  return holders("An all-to-all turns a cut of tokens into a cut of heads",
                 {dtensor::held_by("outside attention", {8, 8}, c, by_tokens),
                  dtensor::held_by("inside", {8, 8}, c, by_heads)});
}

// --- Bytes and trainings -----------------------------------------------------

/// Elements that a rank sends for a layer, forward and backward.
inline double layer_elements(sp::Kind kind, double c, double bsh) {
  sp::SequenceOptions setup;
  setup.kind = kind;
  const sp::LayerElements each = sp::layer_elements(setup, c, bsh);
  return each.forward + each.backward + each.backward_sums;
}

/// In units of bsh.
inline Picture elements_table(const std::vector<int>& sizes) {
  return table_of({"ranks", "Ulysses", "RSA", "ring"}, sizes, [](int c) {
    return cells(c, fixed(layer_elements(sp::Kind::kUlysses, c, 1), 3),
                 fixed(layer_elements(sp::Kind::kRsa, c, 1), 3),
                 fixed(layer_elements(sp::Kind::kRing, c, 1), 3));
  });
}

inline Picture compare(const std::vector<std::pair<std::string, Report>>& all) {
  const auto row = [](const std::pair<std::string, Report>& each) {
    const auto& [name, report] = each;
    return cells(name, fixed(report.losses.back(), 4), kib(sent_bytes(report)),
                 kib(peak_of(report, MemoryKind::kActivation)),
                 report.parity.passed ? "yes" : "NO");
  };
  return table_of({"way", "last loss", "sent per rank", "activations", "equal"},
                  all, row);
}

/// A run of a model on shapes, one sequence, a rank per device.
inline Report on_shapes(const std::string& options, int ranks,
                        const std::string& sizes, std::int64_t seq) {
  return run(
      joined("12_sequence_parallel --backend sim --data random --steps "
             "2 --batch 1 --world-size ",
             ranks, " --seq ", seq, " --model '{", sizes,
             R"(, "n_positions": )", seq, "}' ", options));
}

/// A step of GPT-2 on 32768 tokens, on four A100.
inline Bar step_bar(const std::string& name, const std::string& options) {
  const std::string gpt2 =
      R"("n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257)";
  return {name, step_s(on_shapes("--cluster dgx-a100 --dtype bf16 " + options,
                                 4, gpt2, 32768))};
}

/// Exposed communication of a step on 8 ranks of `textbook`, by the tokens of a
/// rank.
inline Picture exposed_table(const std::vector<std::int64_t>& own_tokens) {
  const auto row = [](std::int64_t own) {
    const auto exposed = [&](const std::string& kind) {
      const std::string sizes =
          R"("n_embd": 1024, "n_layer": 4, "n_head": 16, "vocab_size": 256)";
      return ms(exposed_s(on_shapes("--cluster textbook --kind " + kind, 8,
                                    sizes, 8 * own)),
                1);
    };
    return cells(own, exposed("ring --layout zigzag"), exposed("ulysses"));
  };
  return table_of({"tokens of a rank", "ring, zigzag", "Ulysses"}, own_tokens,
                  row);
}

}  // namespace notes
