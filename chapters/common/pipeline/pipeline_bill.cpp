#include "chapters/common/pipeline/pipeline_bill.h"

#include <algorithm>
#include <utility>

#include "chapters/common/run/kept.h"
#include "chapters/common/run/training.h"

namespace shardbook::pipeline {

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
    bill[MemoryKind::kParameter] *=
        max_versions(schedule)[static_cast<std::size_t>(rank)];
  }
  const ModelConfig config = model_config(options);
  bill[MemoryKind::kActivation] = engine.predicted_kept(
      [&](int layer, std::int64_t rows) {
        return kept_by_layer(config, layer, kept_sizes(options, rows));
      },
      [&](int layer, std::int64_t rows) {
        return deferred_by_layer(config, layer, kept_sizes(options, rows));
      },
      // A block of a GPT begins with a norm; the mlp's products read the input
      /*keeps_input=*/config.type == "gpt2");
  return bill;
}

// --- Time --------------------------------------------------------------------

Costs layer_costs(const textbook::GptTimes& times, int layer, int last) {
  if (layer == 0) return {0, 0, 0, 0};
  const double products = layer == last ? times.head() : times.dense();
  const double attention = layer == last ? 0 : times.attention();
  return {products + attention, 2 * products + 2.5 * attention,
          products + 2.5 * attention, products};
}

namespace {

/// Without a flush: the last step of a rank in which a forward runs. In later
/// ones the pipeline drains.
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
  if (!textbook::is_chosen(options) || config.type != "gpt2" ||
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
    const auto rank = static_cast<std::size_t>(schedule.place(0, stage).rank);
    return replay.flushed[rank];
  };
  const double p = schedule.num_ranks;
  const double table = static_cast<double>(
      config.vocab_size * config.n_embd *
      static_cast<std::int64_t>(dtype_bytes(options.dtype)));
  const bool is_tied = schedule.place(0, 0).rank !=
                       schedule.place(0, schedule.num_stages - 1).rank;
  const double ends = std::max(end(0), end(schedule.num_stages - 1)) +
                      (is_tied ? textbook::all_reduce(2, table) : 0);
  return std::max(replay.makespan, ends) + textbook::all_reduce(p, 16);
}

}  // namespace shardbook::pipeline
