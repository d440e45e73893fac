#pragma once

// What the notebook 12_sequence_parallel calls: which rank has which tokens,
// attention in blocks, trainings, and tables of their results.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/12_sequence_parallel/bill.h"
#include "chapters/12_sequence_parallel/ring_exchange.h"
#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "chapters/pictures/figure.h"
#include "chapters/pictures/palette.h"
#include "chapters/programs/programs.h"
#include "comm/device_mesh.h"
#include "core/attention_block.h"
#include "core/ops.h"
#include "notebooks/lessons.h"

namespace notes {

using namespace shardbook::notebook;
namespace sp = shardbook::sequence_parallel;

/// "0 1 2 3": the tokens of a rank.
inline std::string tokens_text(sp::Layout layout, int rank, int c,
                               std::int64_t s) {
  std::string text;
  for (const std::int64_t token : sp::positions(layout, rank, c, s)) {
    text += (text.empty() ? "" : " ") + std::to_string(token);
  }
  return text;
}

/// The causal mask of s tokens. A row has the colour of its query's rank.
inline Picture mask(sp::Layout layout, int c, std::int64_t s) {
  const std::vector<pictures::Stroke> strokes = {
      pictures::kBlue, pictures::kOrange, pictures::kGreen, pictures::kPurple};
  const double cell = 12;
  pictures::Figure figure("A causal mask in the colours of the ranks", 480);
  const double top = figure.add_row(cell * static_cast<double>(s));
  Picture picture;
  for (int rank = 0; rank < c; ++rank) {
    const std::string color =
        strokes[static_cast<std::size_t>(rank) % strokes.size()].color;
    for (const std::int64_t query : sp::positions(layout, rank, c, s)) {
      for (std::int64_t key = 0; key <= query; ++key) {
        figure.box(
            {cell * static_cast<double>(key),
             top + cell * static_cast<double>(query), cell - 1, cell - 1},
            color);
      }
    }
    const std::string tokens =
        joined("rank ", rank, ": ", tokens_text(layout, rank, c, s));
    figure.text(cell * static_cast<double>(s) + 20, top + 14 + 20 * rank,
                tokens, pictures::Figure::Anchor::kStart, color);
    picture.text += tokens + "\n";
  }
  picture.svg = figure.svg(picture.text);
  return picture;
}

/// Pairs that `rank` computes while it has the keys of step `step`.
inline double pairs_in_step(sp::Layout layout, int rank, int step, int c,
                            std::int64_t s) {
  double pairs = 0;
  for (const AttentionBlock& block : sp::visible_blocks(
           layout, rank, sp::source_at(rank, step, c), c, s / c, true)) {
    pairs += visible_pairs(block);
  }
  return pairs;
}

/// Pairs by step and rank, the most of each step, and sums.
inline Picture pairs_table(sp::Layout layout, int c, std::int64_t s) {
  Rows rows = {{"step"}};
  std::vector<double> sums(static_cast<std::size_t>(c) + 1);
  for (int rank = 0; rank < c; ++rank) rows[0].push_back(joined("rank ", rank));
  rows[0].push_back("most");
  for (int step = 0; step < c; ++step) {
    rows.push_back({std::to_string(step)});
    double most = 0;
    for (int rank = 0; rank < c; ++rank) {
      const double pairs = pairs_in_step(layout, rank, step, c, s);
      most = std::max(most, pairs);
      sums[static_cast<std::size_t>(rank)] += pairs;
      rows.back().push_back(fixed(pairs, 0));
    }
    sums.back() += most;
    rows.back().push_back(fixed(most, 0));
  }
  rows.push_back({"all"});
  for (const double sum : sums) rows.back().push_back(fixed(sum, 0));
  return table(rows);
}

/// Normal numbers [1, 32, 8] that depend on the name alone: two heads of four.
inline Tensor sequence(const std::string& name) {
  return numbers({1, 32, 8}, name);
}

/// This rank's tokens.
inline Tensor part_of(const Tensor& whole, ProcessGroup& world) {
  return sp::cut_sequence(whole, 1, sp::Layout::kContiguous, world.rank(),
                          world.size());
}

/// Every query sees every key.
inline AttentionOptions two_heads() {
  AttentionOptions options;
  options.heads = 2;
  options.causal = false;
  return options;
}

inline Tensor attention_of_one_device() {
  return attention(sequence("q"), sequence("k"), sequence("v"), two_heads());
}

/// Output and logarithms of sums of these queries over these keys and values.
inline AttentionSums attend(const Tensor& q, const Tensors& keys_values) {
  AttentionBlock block;
  block.queries = {0, q.size(1)};
  block.keys = {0, keys_values[0].size(1)};
  return attention_block(q, keys_values[0], keys_values[1], block, two_heads(),
                         next_attention_draws());
}

/// A row for each rank, a column for each step.
inline Picture errors_table(const std::vector<std::vector<double>>& ranks) {
  std::vector<std::string> titles = {"rank"};
  for (std::size_t step = 0; step < ranks[0].size(); ++step) {
    titles.push_back(joined("after step ", step));
  }
  return by_rank(titles, ranks, 6);
}

/// Eight tokens as rows, four heads of two as columns.
inline Picture before_and_after(int c) {
  const auto by_tokens = [c](int rank) { return Shards{{0, rank, c}}; };
  const auto by_heads = [c](int rank) { return Shards{{1, rank, c}}; };
  return holders("An all-to-all turns a cut of tokens into a cut of heads",
                 {dtensor::held_by("outside attention", {8, 8}, c, by_tokens),
                  dtensor::held_by("inside", {8, 8}, c, by_heads)});
}

/// Elements that a rank sends for a layer, forward and backward, in units of
/// bsh.
inline Picture elements_table(const std::vector<int>& sizes) {
  Rows rows = {{"ranks", "Ulysses", "RSA", "ring"}};
  for (const int c : sizes) {
    rows.push_back({std::to_string(c)});
    for (const sp::Kind kind :
         {sp::Kind::kUlysses, sp::Kind::kRsa, sp::Kind::kRing}) {
      sp::SequenceOptions setup;
      setup.kind = kind;
      const sp::LayerElements each = sp::layer_elements(setup, c, 1);
      rows.back().push_back(
          fixed(each.forward + each.backward + each.backward_sums, 3));
    }
  }
  return table(rows);
}

/// Four ranks on threads train the smallest GPT.
inline const std::string kSmall =
    " --model gpt-nano --data walk --world-size 4 --batch 2 --seq 128 --steps "
    "4";

inline Picture compare(const std::vector<Report>& reports,
                       const std::vector<std::string>& names) {
  Rows rows = {{"way", "last loss", "sent per rank", "activations", "equal"}};
  for (std::size_t i = 0; i < reports.size(); ++i) {
    rows.push_back({names[i], fixed(reports[i].losses.back(), 4),
                    kib(reports[i].ranks[0].bytes.counted),
                    kib(peak_of(reports[i], MemoryKind::kActivation)),
                    reports[i].parity.passed ? "yes" : "NO"});
  }
  return table(rows);
}

/// The options of a model on shapes, one sequence, a rank per device.
inline std::string on_shapes(const std::string& cluster, int ranks,
                             const std::string& sizes, std::int64_t seq) {
  return joined(" --backend sim --cluster ", cluster, " --world-size ", ranks,
                " --model '{", sizes, R"(, "n_positions": )", seq,
                "}' --data random --steps 2 --batch 1 --seq ", seq);
}

/// A step of GPT-2 on 32768 tokens, on four A100.
inline Bar step_bar(const std::string& name, const std::string& options) {
  const Report report =
      run("12_sequence_parallel --dtype bf16 " + options +
          on_shapes("dgx-a100", 4,
                    R"("n_embd": 768, "n_layer": 12, "n_head": 12,
                   "vocab_size": 50257)",
                    32768));
  return {name, report.time.step_s};
}

inline Picture step_bars() {
  return bars("Zigzag takes a third off the step of a ring",
              {step_bar("ring, contiguous", "--kind ring"),
               step_bar("ring, zigzag", "--kind ring --layout zigzag"),
               step_bar("Ulysses", "--kind ulysses")},
              {"ms", 1e-3});
}

/// Exposed communication of a step on 8 ranks of `textbook`, by the tokens of a
/// rank.
inline Picture exposed_table(const std::vector<std::int64_t>& own_tokens) {
  Rows rows = {{"tokens of a rank", "ring, zigzag", "Ulysses"}};
  for (const std::int64_t own : own_tokens) {
    rows.push_back({std::to_string(own)});
    for (const char* kind : {"ring --layout zigzag", "ulysses"}) {
      const Report report =
          run(std::string("12_sequence_parallel --kind ") + kind +
              on_shapes("textbook", 8,
                        R"("n_embd": 1024, "n_layer": 4,
                                             "n_head": 16, "vocab_size": 256)",
                        8 * own));
      rows.back().push_back(ms(report.time.exposed_comm_s, 1));
    }
  }
  return table(rows);
}

/// The right answers of the exercises.
inline double ulysses_bytes(double bsh, double c) {
  sp::SequenceOptions setup;
  setup.kind = sp::Kind::kUlysses;
  const sp::LayerElements each = sp::layer_elements(setup, c, bsh);
  return 2 * (each.forward + each.backward);
}

inline double second_chunk(int rank, int c, std::int64_t s) {
  return static_cast<double>(
      sp::token_runs(sp::Layout::kZigzag, rank, c, s)[1].first);
}

}  // namespace notes
