// Seconds of a step on the cluster `textbook`.

#include <algorithm>

#include "chapters/12_sequence_parallel/bill.h"
#include "chapters/14_hybrid_3d/bill.h"

namespace shardbook::hybrid {

bool has_step_time(const Options& options, const HybridOptions& setup,
                   const pipeline::Schedule& schedule) {
  // Striped ranks differ; RSA's masks come from the host in the first step
  const bool is_unusual =
      setup.cp > 1 && (setup.cp_layout == "striped" ||
                       (setup.cp_kind == "rsa" && options.steps == 1));
  return textbook::is_chosen(options) && options.steps > 0 &&
         model_config(options).type == "gpt2" && !is_unusual &&
         !setup.expert_tp && schedule.routes.size() == 1;
}

// --- Layers ------------------------------------------------------------------

namespace {

using pipeline::Costs;

Costs operator+(const Costs& a, const Costs& b) {
  return {a.forward + b.forward, a.backward + b.backward,
          a.backward_input + b.backward_input,
          a.backward_weight + b.backward_weight};
}

/// The parts of a block, in the letters of the page.
struct BlockTimes {
  explicit BlockTimes(const BillSizes& z)
      : z(z), x(z.tokens() * z.h() * z.element) {}

  /// 2 operations for each of a token's weights, shared by the tp group.
  double product(double weights) const {
    return 2 * weights * z.tokens() / z.t() / textbook::kRate;
  }
  bool is_cut() const { return z.setup->sequence_parallel && z.t() > 1; }
  /// An all-reduce of x, or half of it where tokens are cut over tp.
  double message() const {
    return is_cut() ? textbook::all_gather(z.t(), x)
                    : textbook::all_reduce(z.t(), x);
  }

  // The input gradient's message overlaps the weight gradient's product, unless
  // that product is left for W
  Costs column(double weights) const {
    const double q = product(weights), a = message();
    if (!is_cut()) return {q, q + std::max(q, a), q + a, q};
    // Tokens are gathered, for backward once more; nothing is left for W
    return {a + q, 2 * std::max(q, a), 2 * std::max(q, a), 0};
  }
  Costs row(double weights) const {
    const double q = product(weights), a = message();
    const double gathers = is_cut() ? a : 0;
    return {q + a, gathers + 2 * q, gathers + q, q};
  }
  Costs attention() const {
    const double part = x / z.t();  // bytes of a rank's K, of V, of Q
    const auto [forward, backward] = sequence_parallel::attention_times(
        z.setup->sequence(), z.c(), static_cast<double>(z.options->seq),
        2 * z.h() * z.rows / z.t() / textbook::kRate, part,
        part / z.element * z.sum);
    return {forward, backward, backward, 0};
  }
  Costs experts() const {
    const HybridOptions& setup = *z.setup;
    const auto slots =
        static_cast<double>(setup.experts) *
        static_cast<double>(moe::capacity(static_cast<std::int64_t>(z.tokens()),
                                          setup.moe().gate, true));
    const double h = z.h(), e = static_cast<double>(setup.experts);
    const double gate = 2 * z.tokens() * h * e / textbook::kRate;
    // Two products of 4 h h for each slot; slots travel to experts and back
    const double expert = 2 * 8 * h * h * slots / z.t() / textbook::kRate;
    const double exchanges =
        2 * textbook::all_gather(setup.ep, slots * h / z.t() * z.element) +
        textbook::all_gather(z.t(), slots * h * z.element);
    const double gathers = is_cut() ? message() : 0;
    // In 16 bits a gate computes in f32, with a copy of its weights: their
    // gradient does not wait for W
    const double later = z.element == 2 ? expert : gate + expert;
    const double backward = 2 * (gate + expert) + exchanges + gathers;
    return {gate + expert + exchanges + gathers, backward, backward - later,
            later};
  }

  const BillSizes& z;
  double x;  ///< bytes of a micro-batch's activations between blocks
};

/// Seconds of a layer for a micro-batch of this size, messages inside it included.
Costs layer_costs(const BillSizes& z, int layer) {
  const BlockTimes at(z);
  const double h = z.h(), a = at.message();
  const double cut = at.is_cut() ? a : 0;
  if (layer == 0) return {a, cut, cut, 0};
  if (layer == z.layers->list->size() - 1) {
    const double q = at.product(h * z.vocabulary());
    const double loss = 3 * textbook::all_reduce(z.t(), z.tokens() * z.sum) +
                        textbook::all_reduce(z.c(), 2 * z.sum);
    return {cut + q + loss, 2 * q + a, q + a, q};
  }
  const Costs attention = at.attention();
  Costs block =
      at.column(3 * h * h) + attention + at.row(h * h) +
      (z.setup->has_experts() ? at.experts()
                              : at.column(4 * h * h) + at.row(4 * h * h));
  const double again = z.setup->recompute == "blocks"      ? block.forward
                       : z.setup->recompute == "attention" ? attention.forward
                                                           : 0;
  block.backward += again;
  block.backward_input += again;
  return block;
}

}  // namespace

// --- The update --------------------------------------------------------------

UpdateTimes update_times(const BillSizes& z) {
  UpdateTimes times;
  for (const UpdateBucket& bucket : *z.buckets) {
    const double grad = bucket.gradient_bytes, ranks = bucket.data->size();
    const auto kept = static_cast<double>(bucket.updated_numel());
    if (bucket.flat.defined()) {
      const auto whole = static_cast<double>(bucket.flat.numel());
      times.sums += textbook::reduce_scatter(ranks, whole * grad);
      times.gather += textbook::all_gather(ranks, whole * z.element);
    } else {
      times.sums += textbook::all_reduce(ranks, kept * grad);
    }
    if (bucket.is_partial) {
      times.sums += textbook::all_reduce(z.t(), kept * grad);
    }
    if (bucket.tied != nullptr) {
      times.tied += textbook::all_reduce(bucket.tied->size(), kept * grad);
    }
  }
  return times;
}

double step_s(const BillSizes& z, pipeline::Engine& engine,
              const std::vector<UpdateTimes>& updates) {
  std::vector<double> begins;
  for (const UpdateTimes& each : updates) {
    begins.push_back(z.options->steps > 1 ? each.gather : 0);
  }
  BillSizes piece = z;
  const pipeline::Replay replay = engine.predicted_times(
      [&](int layer, std::int64_t rows) {
        piece.rows = static_cast<double>(rows);
        return layer_costs(piece, layer);
      },
      begins);
  double all = 0, tied = 0, tied_s = 0;
  for (std::size_t rank = 0; rank < updates.size(); ++rank) {
    const double end = replay.flushed[rank] + updates[rank].sums;
    all = std::max(all, end);
    if (updates[rank].tied > 0) tied = std::max(tied, end);
    tied_s = std::max(tied_s, updates[rank].tied);
  }
  const double norm =
      std::max(all, tied + tied_s) + textbook::all_reduce(z.world(), 16);
  double longest = 0;
  for (std::size_t rank = 0; rank < updates.size(); ++rank) {
    longest = std::max(longest, norm + updates[rank].gather - begins[rank]);
  }
  return longest;
}

// --- ZeRO-2 and -3 -------------------------------------------------------------

textbook::ModelTimes model_times(const BillSizes& z) {
  const int last = z.layers->list->size() - 1;
  const Costs embedding = layer_costs(z, 0), head = layer_costs(z, last);
  const Costs block = layer_costs(z, 1);
  return {last - 1.0,    block.forward,     block.backward,    head.forward,
          head.backward, embedding.forward, embedding.backward};
}

}  // namespace shardbook::hybrid
