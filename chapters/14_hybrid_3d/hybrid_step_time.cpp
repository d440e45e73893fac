// Seconds of a step on the cluster `textbook`.

#include <algorithm>
#include <set>
#include <sstream>

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
         !model_config(options).is_image() && !is_unusual && !setup.expert_tp &&
         !setup.has_own_experts && schedule.routes.size() == 1 &&
         !(setup.overlap_grad_reduce && setup.has_experts());
}

// --- Layers ------------------------------------------------------------------

namespace {

using pipeline::at;
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

  /// Shared by the tp group.
  double product(const BlockPart& part) const {
    const auto seq = static_cast<double>(z.options->seq);
    return part.operations(seq) * z.tokens() / z.t() / textbook::kRate;
  }
  bool is_cut() const { return z.setup->sequence_parallel && z.t() > 1; }
  /// An all-reduce of x, or half of it where tokens are cut over tp.
  double message() const {
    return is_cut() ? textbook::all_gather(z.t(), x)
                    : textbook::all_reduce(z.t(), x);
  }

  // The input gradient's message overlaps the weight gradient's product, unless
  // that product is left for W
  Costs column(const BlockPart& part) const {
    const double q = product(part), a = message();
    if (!is_cut()) return {q, q + std::max(q, a), q + a, q};
    // Tokens are gathered, for backward once more; nothing is left for W
    return {a + q, 2 * std::max(q, a), 2 * std::max(q, a), 0};
  }
  Costs row(const BlockPart& part) const {
    const double q = product(part), a = message();
    const double gathers = is_cut() ? a : 0;
    return {q + a, gathers + 2 * q, gathers + q, q};
  }
  Costs attention() const {
    // Bytes of a rank's queries
    const double part = z.tokens() * z.queries() * z.element / z.t();
    const auto [forward, backward] = sequence_parallel::attention_times(
        z.setup->sequence(), z.c(), static_cast<double>(z.options->seq),
        2 * z.queries() * z.rows / z.t() / textbook::kRate, part,
        part / z.element * z.sum, z.key_share());
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

/// A part of a block, with the begin of its parameters' names.
struct Part {
  std::string name;
  Costs costs;
};

/// In the order of forward.
std::vector<Part> block_parts(const BillSizes& z) {
  const BlockTimes at(z);
  const BlockTable block = z.block();
  Costs attention = at.attention();
  if (z.setup->recompute == "attention") {
    attention.backward += attention.forward;
    attention.backward_input += attention.forward;
  }
  std::vector<Part> parts = {{block.qkv.name, at.column(block.qkv)},
                             {"", attention},
                             {block.proj.name, at.row(block.proj)}};
  if (z.setup->has_experts()) {
    parts.push_back({block.mlp_module, at.experts()});
  } else {
    parts.push_back({block.up.name, at.column(block.up)});
    parts.push_back({block.down.name, at.row(block.down)});
  }
  return parts;
}

/// Seconds of a layer for a micro-batch of this size, messages inside it included.
Costs layer_costs(const BillSizes& z, int layer) {
  const BlockTimes at(z);
  const double a = at.message(), cut = at.is_cut() ? a : 0;
  if (layer == 0) return {a, cut, cut, 0};
  if (layer == z.layers->list->size() - 1) {
    const double q =
        2 * (z.h() * z.vocabulary()) * z.tokens() / z.t() / textbook::kRate;
    const double loss = 3 * textbook::all_reduce(z.t(), z.tokens() * z.sum) +
                        textbook::all_reduce(z.c(), 2 * z.sum);
    return {cut + q + loss, 2 * q + a, q + a, q};
  }
  Costs block{0, 0, 0, 0};
  for (const Part& part : block_parts(z)) block = block + part.costs;
  if (z.setup->recompute == "blocks") {
    block.backward += block.forward;
    block.backward_input += block.forward;
  }
  return block;
}

// --- Gradients during backward -----------------------------------------------

double seconds_of(const Costs& costs, pipeline::ActionKind kind) {
  return kind == pipeline::ActionKind::kBackward        ? costs.backward
         : kind == pipeline::ActionKind::kBackwardInput ? costs.backward_input
                                                        : costs.backward_weight;
}

/// A parameter's place in the model, from its name.
struct Owner {
  Owner(const BillSizes& z, const std::string& parameter)
      : names(decoder_names(z.layers->padded)),
        module(parameter.substr(0, parameter.rfind('.'))),
        is_bias(parameter.ends_with(".bias")) {
    if (module.rfind(names.blocks + ".", 0) != 0) return;
    block = block_of(z.layers->padded, module);
    in_block = module.substr(names.block(block).size() + 1);
  }
  bool is_table() const {
    return module == names.table || module == names.output();
  }

  DecoderNames names;
  std::string module, in_block;  ///< "mlp.c_fc"; empty outside of blocks
  bool is_bias = false;
  std::int64_t block = -1;
};

/// Seconds between the gradient that B, I or W of a layer adds to a parameter
/// and the end of the layer's part of that action; negative if it adds none.
double left_after(const BillSizes& z, const std::string& parameter, int layer,
                  pipeline::ActionKind kind) {
  const BlockTimes at(z);
  const BlockTable block = z.block();
  const Owner owner(z, parameter);
  const auto is_weight_of = [&](const BlockPart& part) {
    return owner.in_block == part.name && !owner.is_bias;
  };
  const bool is_weight = kind == pipeline::ActionKind::kBackwardWeight;
  // Lookups and products leave their weights' gradients for W, except where
  // tokens are gathered for them
  const bool is_column = is_weight_of(block.qkv) || is_weight_of(block.up);
  const bool is_put_off = owner.is_table() || is_weight_of(block.proj) ||
                          is_weight_of(block.down) ||
                          (is_column && !at.is_cut());
  if (kind != pipeline::ActionKind::kBackward && is_put_off != is_weight) {
    return -1;
  }
  if (layer == 0) {
    const bool is_position = owner.module == owner.names.positions;
    return is_position && at.is_cut() ? at.message() : 0;
  }
  if (owner.is_table()) return is_weight ? 0 : at.message();
  if (owner.block < 0) return 0;  // the last norm
  // The parts before the parameter's own in forward are left
  double left = 0;
  for (const Part& part : block_parts(z)) {
    const bool is_own = !part.name.empty() &&
                        (owner.in_block + ".").rfind(part.name + ".", 0) == 0;
    // A norm comes before the part, those of heads before attention; a bias over
    // tp comes after it
    const bool is_norm_before =
        (owner.in_block == block.norm_1.name && part.name == block.qkv.name) ||
        (owner.in_block == block.norm_2.name && part.name == block.up.name);
    const bool is_of_heads = std::any_of(
        block.head_norms.begin(), block.head_norms.end(),
        [&](const BlockPart& norm) { return owner.in_block == norm.name; });
    if (is_norm_before || (is_of_heads && part.name.empty())) return left;
    const bool is_behind =
        owner.is_bias && z.t() > 1 &&
        (part.name == block.proj.name || part.name == block.down.name);
    if (is_own && !is_behind) return left;
    left += seconds_of(part.costs, kind);
    if (is_own) return left;
  }
  return 0;
}

/// Those of the layers [begin, end) that add a gradient to the parameter.
std::vector<int> layers_with(const BillSizes& z, const std::string& parameter,
                             int begin, int end) {
  const int last = z.layers->list->size() - 1;
  const Owner owner(z, parameter);
  std::vector<int> layers;
  if (owner.block >= 0) layers.push_back(1 + static_cast<int>(owner.block));
  if (owner.module == owner.names.table ||
      owner.module == owner.names.positions) {
    layers.push_back(0);
  }
  if (owner.module == owner.names.output() ||
      owner.module == owner.names.norm) {
    layers.push_back(last);
  }
  std::erase_if(layers,
                [=](int layer) { return layer < begin || layer >= end; });
  return layers;
}

/// When the last B, I and W of a stage have added their gradients to the
/// parameter: the latest of them.
double complete_s(const BillSizes& z, const std::string& parameter,
                  const pipeline::Schedule& schedule,
                  const pipeline::Replay& replay, int rank) {
  double latest = 0;
  const auto& list = schedule.actions[at(rank)];
  std::set<std::pair<pipeline::ActionKind, int>> seen;
  for (std::size_t i = list.size(); i-- > 0;) {
    const pipeline::Action& action = list[i];
    if (action.kind == pipeline::ActionKind::kForward ||
        !seen.insert({action.kind, action.chunk}).second) {
      continue;
    }
    const int stage = schedule.stage_at(rank, action.chunk);
    const int begin = z.cuts[at(stage)], end = z.cuts[at(stage) + 1];
    std::vector<int> layers = layers_with(z, parameter, begin, end);
    // W adds the gradients of a lookup and of the head at once, with the head's
    if (action.kind == pipeline::ActionKind::kBackwardWeight &&
        layers.size() == 2) {
      layers = {layers.back()};
    }
    for (const int layer : layers) {
      double left = left_after(z, parameter, layer, action.kind);
      if (left < 0) continue;
      for (int before = begin; before < layer; ++before) {
        left += seconds_of(layer_costs(z, before), action.kind);
      }
      latest = std::max(latest, replay.spans[at(rank)][i].end - left);
    }
  }
  return latest;
}

// --- The update --------------------------------------------------------------

/// Seconds of a bucket's first sum.
double sum_s(const UpdateBucket& bucket) {
  const double grad = bucket.gradient_bytes, ranks = bucket.data->size();
  if (bucket.flat.defined()) {
    return textbook::reduce_scatter(
        ranks, static_cast<double>(bucket.flat.numel()) * grad);
  }
  return textbook::all_reduce(ranks,
                              static_cast<double>(bucket.numel()) * grad);
}

/// Seconds of a rank's update, part by part.
struct UpdateTimes {
  double sums = 0;     ///< of gradients over dp x cp
  double partial = 0;  ///< over tp
  double tied = 0;     ///< of the table over its stages
  double gather = 0;   ///< of ZeRO-1's parameters
};

UpdateTimes update_times(const BillSizes& z) {
  UpdateTimes times;
  for (const UpdateBucket& bucket : *z.buckets) {
    const double kept =
        static_cast<double>(bucket.updated_numel()) * bucket.gradient_bytes;
    times.sums += sum_s(bucket);
    if (bucket.flat.defined()) {
      times.gather += textbook::all_gather(
          bucket.data->size(), static_cast<double>(bucket.flat.bytes()));
    }
    if (bucket.is_partial) times.partial += textbook::all_reduce(z.t(), kept);
    if (bucket.tied != nullptr) {
      times.tied += textbook::all_reduce(bucket.tied->size(), kept);
    }
  }
  return times;
}

/// When the last bucket of a rank has been summed, if each leaves when it is
/// full.
double overlapped_sums_end(const BillSizes& z, pipeline::Engine& engine,
                           const pipeline::Replay& replay, int rank) {
  std::vector<std::pair<double, double>> buckets;  // full at, seconds
  for (const UpdateBucket& bucket : *z.buckets) {
    double full = 0;
    for (const NamedTensor& each : bucket.parameters) {
      full = std::max(
          full, complete_s(z, each.name, engine.schedule(), replay, rank));
    }
    buckets.emplace_back(full, sum_s(bucket));
  }
  std::sort(buckets.begin(), buckets.end());
  double end = 0;
  for (const auto& [full, seconds] : buckets) {
    end = std::max(end, full) + seconds;
  }
  return end;
}

/// Each rank's number.
std::vector<double> of_all(ProcessGroup& pp, double own) {
  std::ostringstream text;
  text.precision(17);
  text << own;
  std::vector<double> all;
  for (const std::string& each : pp.exchange(text.str())) {
    all.push_back(std::stod(each));
  }
  return all;
}

}  // namespace

double step_s(const BillSizes& z, pipeline::Engine& engine, ProcessGroup& pp) {
  const UpdateTimes own = update_times(z);
  const std::vector<double> gathers = of_all(pp, own.gather);
  const bool is_first = z.options->steps == 1;
  const auto begins = is_first ? std::vector<double>(gathers.size()) : gathers;
  BillSizes piece = z;
  const pipeline::Replay replay = engine.predicted_times(
      [&](int layer, std::int64_t rows) {
        piece.rows = static_cast<double>(rows);
        return layer_costs(piece, layer);
      },
      begins);
  const double flushed = replay.flushed[at(pp.rank())];
  // The first step counts gradients, and sums them at its end
  const double sums =
      z.setup->overlap_grad_reduce && !is_first
          ? std::max(flushed, overlapped_sums_end(z, engine, replay, pp.rank()))
          : flushed + own.sums;
  const std::vector<double> ends = of_all(pp, sums + own.partial);
  const std::vector<double> tied = of_all(pp, own.tied);
  double all = 0, tied_end = 0, tied_s = 0;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    all = std::max(all, ends[rank]);
    if (tied[rank] > 0) tied_end = std::max(tied_end, ends[rank]);
    tied_s = std::max(tied_s, tied[rank]);
  }
  const double norm =
      std::max(all, tied_end + tied_s) + textbook::all_reduce(z.world(), 16);
  double longest = 0;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    longest = std::max(longest, norm + gathers[rank] - begins[rank]);
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
