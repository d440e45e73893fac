#include "chapters/common/pipeline/pipeline_bill.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "chapters/common/run/kept.h"
#include "chapters/common/run/training.h"

namespace shardbook::pipeline {

// --- Bytes sent --------------------------------------------------------------

// Between two stages, m messages go forward and m go backward, unless both
// stages are on one rank.
double Engine::predicted_bytes() {
  const int listed = schedule_.num_micro_batches;
  return sent_bytes(0, listed) +
         schedule_.repeats * sent_bytes(listed - schedule_.period, listed);
}

double Engine::predicted_redo_bytes() {
  double bytes = 0;
  const int stage = stages_[0];
  for (int b = 0; b < num_first_forwards(world_.rank()); ++b) {
    if (!is_last(stage) && rank_of(b, stage + 1) != world_.rank()) {
      bytes += forward_bytes(spec(b, stage + 1));
    }
  }
  return bytes;
}

double Engine::sent_bytes(int first, int last) {
  double bytes = 0;
  for (int b = first; b < last; ++b) {
    for (int stage = 0; stage < schedule_.num_stages; ++stage) {
      if (!is_here(b, stage)) continue;
      if (!is_last(stage) && !is_here(b, stage + 1)) {
        bytes += forward_bytes(spec(b, stage + 1));
      }
      if (stage > 0 && !is_here(b, stage - 1)) {
        bytes += backward_bytes(spec(b, stage));
      }
      for (const std::string& name : model_.stage(stage).outgoing()) {
        bytes += forward_bytes(skip_spec(name, b, stage + 1));
      }
      for (const std::string& name : model_.stage(stage).incoming()) {
        bytes += backward_bytes(skip_spec(name, b, stage));
      }
    }
  }
  return bytes;
}

// --- Bytes kept between forward and backward ---------------------------------

// A set of activations is kept from F to B or I, and the inputs of the weights'
// gradients from I to W. A value or a gradient between two stages of this rank
// is kept until the second stage uses it.
double Engine::predicted_kept(const LayerBytes& kept,
                              const LayerBytes& deferred, bool keeps_input) {
  using Key = std::pair<int, int>;  // micro-batch and stage
  std::map<Key, double> sets, values, gradients;
  double peak = 0;
  for (const Action& action : schedule_.actions[at(world_.rank())]) {
    if (action.kind == ActionKind::kUpdate) continue;
    const int b = action.micro_batch;
    const int stage = stages_[at(action.chunk)];
    const Key here{b, stage}, next{b, stage + 1};
    const bool hands_on = !is_last(stage) && is_here(b, stage + 1);
    const bool hands_back = stage > 0 && is_here(b, stage - 1);
    switch (action.kind) {
      case ActionKind::kForward: {
        sets[here] = set_bytes(b, stage, kept);
        values.erase(here);
        if (hands_on) values[next] = forward_bytes(spec(b, stage + 1));
        double now = 0;
        for (const auto* each : {&sets, &values, &gradients}) {
          for (const auto& [key, bytes] : *each) now += bytes;
        }
        peak = std::max(peak, now);
        break;
      }
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        sets.erase(here);
        gradients.erase(next);
        if (hands_back) gradients[here] = backward_bytes(spec(b, stage));
        if (action.kind == ActionKind::kBackwardInput) {
          // No formula: neighbours share inputs of weights' gradients here
          if (hands_on || hands_back) return kNotPredicted;
          sets[here] = layers_bytes(b, stage, deferred);
          if (keeps_input && stage > 0) {
            sets[here] += forward_bytes(spec(b, stage));
          }
        }
        break;
      default:
        sets.erase(here);
    }
  }
  return peak;
}

double Engine::layers_bytes(int b, int stage, const LayerBytes& bytes) {
  const PipelineLayout& layout = model_.layout();
  double sum = 0;
  for (int layer = layout.begin(stage); layer < layout.end(stage); ++layer) {
    sum += bytes(layer, feed_.piece(b).rows);
  }
  return sum;
}

double Engine::set_bytes(int b, int stage, const LayerBytes& kept) {
  double skips = 0;
  for (const std::string& name : model_.stage(stage).incoming()) {
    skips += forward_bytes(skip_spec(name, b, stage));
  }
  // Token ids and images are inputs
  const double input = stage > 0 ? forward_bytes(spec(b, stage)) : 0;
  const int chunk = schedule_.place(b, stage).chunk;
  if (recomputed_.contains(schedule_.listed(b), chunk)) return input + skips;
  // A skip to a later stage counts as a message, even if a block reads it
  const int last = model_.layout().end(stage) - 1;
  const std::vector<std::string> at_end = model_.layers().skips(last).stash;
  for (const std::string& name : model_.stage(stage).outgoing()) {
    if (std::find(at_end.begin(), at_end.end(), name) != at_end.end()) continue;
    skips -= forward_bytes(skip_spec(name, b, stage + 1));
  }
  // The first block keeps both its input and the skip that is added to it
  const int first = model_.layout().begin(stage);
  const bool adds = !model_.layers().skips(first).pop.empty();
  return layers_bytes(b, stage, kept) + skips + (adds ? input : 0);
}

// --- Times -------------------------------------------------------------------

Replay Engine::predicted_times(const LayerCosts& layers,
                               const std::vector<double>& begins) {
  std::vector<Recomputed> dropped;
  for (int rank = 0; rank < schedule_.num_ranks; ++rank) {
    dropped.emplace_back(schedule_, rank, options_.recompute);
  }
  ReplayOptions setup;
  setup.recomputes = [&](int rank, const Action& backward) {
    return dropped[at(rank)].contains(backward.micro_batch, backward.chunk);
  };
  setup.early_recompute = options_.early_recompute;
  setup.messages = [this](int stage, int b, bool is_forward) {
    std::vector<Message> sent;
    const int to = is_forward ? stage + 1 : stage - 1;
    if (to >= 0 && to < schedule_.num_stages) {
      const LayerInput& values = spec(b, std::max(stage, to));
      sent.push_back(
          {to, textbook::message(is_forward ? forward_bytes(values)
                                            : backward_bytes(values))});
    }
    for (const auto& [name, route] : skips_) {
      const int from = is_forward ? route.from_stage : route.to_stage;
      if (from != stage) continue;
      sent.push_back({is_forward ? route.to_stage : route.from_stage,
                      textbook::message(
                          forward_bytes(skip_spec(name, b, route.to_stage)))});
    }
    return sent;
  };
  setup.begins = begins;
  const auto stage_costs = [&](int stage, int b) {
    Costs sum{0, 0, 0, 0};
    const PipelineLayout& layout = model_.layout();
    for (int layer = layout.begin(stage); layer < layout.end(stage); ++layer) {
      const Costs each = layers(layer, feed_.piece(b).rows);
      sum.forward += each.forward;
      sum.backward += each.backward;
      sum.backward_input += each.backward_input;
      sum.backward_weight += each.backward_weight;
    }
    return sum;
  };
  return replay(schedule_, stage_costs, setup);
}

// --- Bills -------------------------------------------------------------------

MemoryBill states_bill(const Options& options, PipelineModel& model) {
  double parameters = 0, trained = 0;
  for (const Tensor& each : model.parameters()) {
    trained += static_cast<double>(each.numel());
    parameters += static_cast<double>(each.bytes());
  }
  MemoryBill bill;
  bill.bytes.fill(0);
  bill[MemoryKind::kParameter] = parameters;
  for (int stage = 0; stage < model.layout().num_stages(); ++stage) {
    if (!model.holds(stage)) continue;
    for (const Tensor& each : model.stage(stage).buffers()) {
      bill[MemoryKind::kParameter] += static_cast<double>(each.bytes());
    }
  }
  if (options.steps == 0) return bill;
  bill[MemoryKind::kGradient] = parameters;
  bill[MemoryKind::kOptimizerState] =
      optimizer_states(options) * trained *
      (options.dtype == DType::kF64 ? 8.0 : 4.0);
  return bill;
}

MemoryBill pipeline_bill(const Options& options, PipelineModel& model,
                         Engine& engine, int rank) {
  MemoryBill bill = states_bill(options, model);
  if (options.steps == 0) return bill;
  const Schedule& schedule = engine.schedule();
  if (!schedule.flushes) {
    bill[MemoryKind::kParameter] *= max_versions(schedule)[at(rank)];
  }
  const ModelConfig config = model_config(options);
  if (config.llama.num_experts > 0) {  // as kept_by_model
    bill[MemoryKind::kActivation] = kNoClaim;
    return bill;
  }
  bill[MemoryKind::kActivation] = engine.predicted_kept(
      [&](int layer, std::int64_t rows) {
        return kept_by_layer(config, layer, kept_sizes(options, rows));
      },
      [&](int layer, std::int64_t rows) {
        return deferred_by_layer(config, layer, kept_sizes(options, rows));
      },
      // A decoder's block begins with a norm; the mlp's products read the input
      /*keeps_input=*/config.has_blocks());
  return bill;
}

// --- The time of a step ------------------------------------------------------

Costs layer_costs(const textbook::GptTimes& times, int layer, int last) {
  if (layer == 0) return {0, 0, 0, 0};
  const double products = layer == last ? times.head() : times.dense();
  const double attention = layer == last ? 0 : times.attention();
  return {products + attention, 2 * products + 2.5 * attention,
          products + 2.5 * attention, products};
}

namespace {

/// Without a flush: a rank's last step with a forward. Later the pipeline
/// drains.
double last_whole_step(const Schedule& schedule, const Replay& replay) {
  double longest = 0;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    double begin = 0, length = 0;
    bool has_forward = false, had_one = false;
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const Span& span = replay.spans[rank][i];
      const ActionKind kind = schedule.actions[rank][i].kind;
      if (kind == ActionKind::kForward) has_forward |= span.begin < span.end;
      if (kind != ActionKind::kUpdate) continue;
      if (has_forward || !had_one) length = span.end - begin;
      had_one |= has_forward;
      begin = span.end;
      has_forward = false;
    }
    longest = std::max(longest, length);
  }
  return longest;
}

}  // namespace

double step_s(const Options& options, PipelineModel& model, Engine& engine) {
  const ModelConfig config = model_config(options);
  const Schedule& schedule = engine.schedule();
  if (!textbook::has_model_times(options, config) || !config.has_blocks() ||
      options.steps == 0 || schedule.routes.size() > 1) {
    return kNotPredicted;
  }
  const int last = model.layers().size() - 1;
  const Replay replay =
      engine.predicted_times([&](int layer, std::int64_t rows) {
        return layer_costs(
            textbook::gpt_times(options, config, static_cast<double>(rows)),
            layer, last);
      });
  if (!schedule.flushes) return last_whole_step(schedule, replay);
  // The ranks of the first and the last stage sum the table's gradient
  const auto end = [&](int stage) {
    const auto rank = at(schedule.place(0, stage).rank);
    return replay.flushed[rank];
  };
  const double p = schedule.num_ranks;
  const double table = static_cast<double>(
      config.vocab_size * config.n_embd *
      static_cast<std::int64_t>(dtype_bytes(options.dtype)));
  // An output layer of its own is summed with nothing
  const bool is_on_two = decoder_names(config).head.empty() &&
                         schedule.place(0, 0).rank !=
                             schedule.place(0, schedule.num_stages - 1).rank;
  const double ends = std::max(end(0), end(schedule.num_stages - 1)) +
                      (is_on_two ? textbook::all_reduce(2, table) : 0);
  return std::max(replay.makespan, ends) + textbook::all_reduce(p, 16);
}

}  // namespace shardbook::pipeline
