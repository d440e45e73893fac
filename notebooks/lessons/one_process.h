#pragma once

// What the notebooks 00_single_device, 04_model_parallel and benchmark call:
// runs of one process on one device and on two, and the numbers in them.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "chapters/00_single_device/single_device.h"
#include "chapters/04_model_parallel/model_parallel.h"
#include "chapters/04_model_parallel/split_sweep.h"
#include "chapters/programs/programs.h"
#include "core/context.h"
#include "core/how_many.h"
#include "core/layers.h"
#include "core/ops.h"
#include "notebooks/lessons.h"

namespace notes {

using namespace shardbook::notebook;
using model_parallel::StepTime;
using model_parallel::Sweep;

// --- One device --------------------------------------------------------------

inline const std::string kOneDevice =
    "00_single_device --batch 24 --steps 6" + kNano;

/// Two steps of a published model on shapes, on a simulated A100.
inline std::string on_shapes(const std::string& model, std::int64_t batch,
                             std::int64_t seq) {
  return joined("00_single_device --steps 2", kA100s, " --model ", model,
                " --batch ", batch, " --seq ", seq);
}

/// The most bytes of all kinds at one time, in the last step on shapes.
inline double peak(const Report& report) {
  return pictures::memory_peak(sim::last_step(report.timelines));
}

/// Peaks of steps of 1, 2, 3, ... samples. The lines across are the last step's
/// peak with recomputation, and parameters with their moments.
inline Picture peaks(const std::string& title, const std::string& model,
                     std::int64_t seq, std::int64_t most_samples) {
  std::vector<Bar> plain;
  for (std::int64_t samples = 1; samples <= most_samples; ++samples) {
    plain.push_back(
        {std::to_string(samples), peak(run(on_shapes(model, samples, seq)))});
  }
  const Report again =
      run(on_shapes(model, most_samples, seq) + " --recompute");
  const Report one = run(on_shapes(model, 1, seq));
  return curve(
      title, plain, "samples", {"recomputed", peak(again)},
      {"12 bytes per parameter", 3 * peak_of(one, MemoryKind::kParameter)},
      {"GiB", 1 << 30});
}

/// Each number of micro-batches, first without and then with recomputation.
inline std::vector<Bar> activation_bars(
    const std::vector<std::int64_t>& pieces) {
  return mapped(std::vector<int>{0, 1}, pieces, [](int again, std::int64_t m) {
    return activation_bar(
        how_many(m, "micro-batch") + (again ? ", recomputed" : ""),
        run(joined(kOneDevice, " --micro-batches ", m,
                   again ? " --recompute" : "")));
  });
}

/// The share of one matrix's weights that bf16 steps at this rate change.
inline Bar changed_bar(double rate, bool master_weights) {
  const Options options = options_of(
      joined(kOneDevice, " --dtype bf16 --batch 2 --seq 16 --lr ", rate));
  single_device::SingleDeviceOptions setup;
  setup.master_weights = master_weights;
  single_device::SingleDevice strategy(options, setup);
  const auto matrix = [&] {
    return strategy.model().model->named_parameters()[6].tensor;
  };
  const std::vector<double> before = matrix().to_vector<double>();
  for (int step = 0; step < options.steps; ++step) strategy.step(step);
  const std::vector<double> after = matrix().to_vector<double>();
  double changed = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    changed += before[i] != after[i];
  }
  const double share = changed / static_cast<double>(before.size());
  return {master_weights ? "with f32 masters" : "bf16 alone", share, 0,
          percent(share, 0)};
}

// --- Two devices -------------------------------------------------------------

/// ResNet-50 on two simulated T4, as PyTorch's tutorial has it: 120 images of
/// 128 x 128.
inline const std::string kTutorial =
    "04_model_parallel --backend sim --world-size 2 --cluster kaggle-t4x2 "
    "--model resnet50 --data random --optimizer sgd --batch 120 "
    "--image-size 128 --seq 1 --steps 3";

/// A ResNet that trains in a moment.
inline const std::string kSmall =
    kTutorial +
    " --backend threads --batch 12 --image-size 16 --steps 4 --lr 0.1 --model "
    R"({"model_type":"resnet","depths":[1,1],"layer_type":"basic",)"
    R"("embedding_size":8,"hidden_sizes":[8,16],"num_labels":10})";

/// A measured time with its deviation.
inline Bar measured_bar(const std::string& name, double mean_s, double sd_s) {
  return {name, mean_s, sd_s,
          fixed(mean_s, 2) + " \u00b1 " + fixed(sd_s, 2) + " s"};
}

/// The measured time, else the virtual one.
inline Bar bar_of(const std::string& name, const StepTime& time) {
  if (time.mean_s >= 0) return measured_bar(name, time.mean_s, time.sd_s);
  return {name, time.virtual_s, 0, fixed(time.virtual_s, 2) + " s"};
}

/// One device, two in turn, and splits, which are named by their sizes.
using Times = std::vector<Bar>;

inline Times times_of(const Sweep& sweep) {
  Times times = {bar_of("one device", sweep.single),
                 bar_of("two, in turn", sweep.naive)};
  for (const StepTime& each : sweep.pipelined) {
    times.push_back(bar_of(std::to_string(each.settings.split_size), each));
  }
  return times;
}

inline Bar best_of(const Times& times) {
  return *std::min_element(
      times.begin() + 2, times.end(),
      [](const Bar& a, const Bar& b) { return a.value < b.value; });
}

/// Bars; of many sizes of splits, the best alone.
inline Picture compare(const Times& times) {
  const Bar best = best_of(times);
  Times shown = times;
  if (shown.size() > 4) shown = {times[0], times[1], best};
  for (std::size_t i = 2; i < shown.size(); ++i) {
    shown[i].name = "splits of " + shown[i].name;
  }
  return bars("Two devices in turn take " +
                  fixed(times[1].value / times[0].value, 2) +
                  " of the time of one, in splits " +
                  fixed(best.value / times[0].value, 2),
              shown, {"s", 1});
}

/// The time over the size of a split.
inline Picture over_sizes(const Times& times) {
  return curve("Splits of " + best_of(times).name + " are the fastest",
               Times(times.begin() + 2, times.end()), "images of a split",
               times[0], times[1], {"s", 1});
}

/// What ./shardbook bench model-parallel measured on two cores of a Xeon: three
/// steps with 24 images, from bench/model_parallel.csv.
inline Times measured_on_a_xeon() {
  std::ifstream lines("../bench/model_parallel.csv");
  Times all;
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line)) {
    std::istringstream values(line);
    Cells row;
    for (std::string value; std::getline(values, value, ',');) {
      row.push_back(value);
    }
    const std::string& variant = row.at(4);
    const std::string name = variant == "single"     ? "one device"
                             : variant == "pipeline" ? row.at(5)
                                                     : "two, in turn";
    all.push_back(
        measured_bar(name, std::stod(row.at(6)), std::stod(row.at(7))));
  }
  return all;
}

/// A small model, cut in two, after a backward.
struct CutStep {
  Tensor output = {};
  std::vector<NamedTensor> parameters = {};
  std::vector<CommRecord> records = {};  ///< of the first device
};

/// `forward(net1, net2, x, second, ledger)` is the output of two layers, the
/// second of which is on another device.
template <typename Forward>
CutStep cut_step(std::int64_t rows, const Forward& forward) {
  const Device first = Device::cpu(0), second = Device::cpu(1);
  RankContext context(first), other(second);
  RankContext::Scope scope(context);
  Linear net1("net1", 10, 10, InitOptions());
  Linear net2 = [&] {
    RankContext::Scope there(other);
    return Linear("net2", 10, 5, InitOptions());
  }();
  const Tensor x = Tensor::empty({rows, 10});
  fill_normal(x, /*seed=*/0, stream_of("rows"), 0, 1);

  const auto ledger = std::make_shared<CopyLedger>();
  CutStep step;
  step.output = forward(net1, net2, x, second, ledger);
  mean(square(step.output)).backward();
  for (Linear* layer : {&net1, &net2}) {
    const std::string name = layer == &net1 ? "net1." : "net2.";
    for (const NamedTensor& p : layer->named_parameters()) {
      step.parameters.push_back({name + p.name, p.tensor});
    }
  }
  step.records = ledger->records(first);
  return step;
}

inline Picture where(const CutStep& step) {
  Rows rows = {{"tensor", "shape", "device", "gradient on"}};
  for (const NamedTensor& p : step.parameters) {
    rows.push_back({p.name, shape_text(p.tensor.shape()),
                    p.tensor.device().name(), p.tensor.grad().device().name()});
  }
  rows.push_back({"output", shape_text(step.output.shape()),
                  step.output.device().name(), ""});
  return table(rows);
}

/// Compares a training in splits of 4, or on two devices in turn, with one
/// device over the whole batch.
inline std::string against_whole_batch(const std::string& variant) {
  const auto last_loss = [](const std::string& options) {
    return run(kSmall + " --no-check --variant " + options).losses.back();
  };
  const double difference =
      last_loss(variant + " --split-size 4") - last_loss("single");
  return variant + (std::abs(difference) < 1e-4 ? ": like the whole batch\n"
                                                : ": DIFFERENT\n");
}

}  // namespace notes
