#pragma once

// What the notebooks 01_data_parallel, 02_ddp and 03_zero_fsdp call: small
// inputs, runs, and pictures of what they counted.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/01_data_parallel/bill.h"
#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/02_ddp/bucket.h"
#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/common/lesson.h"
#include "chapters/common/toy.h"
#include "chapters/programs/programs.h"
#include "core/check.h"
#include "notebooks/lessons.h"
#include "notebooks/live_ranks.h"

namespace notes {

using namespace shardbook::notebook;

constexpr int kSteps = 8;
/// gpt-nano on four devices, or four ranks, of this machine.
inline const std::string kSmall =
    joined(" --world-size 4 --batch 8 --steps ", kSteps, kNano);

/// On shapes alone, in virtual time: eight ranks, each with `samples` samples.
inline std::string simulated(const std::string& cluster,
                             const std::string& model, std::int64_t samples,
                             std::int64_t seq) {
  return joined(
      " --backend sim --world-size 8 --data random --steps 3 --cluster ",
      cluster, " --model ", model, " --batch ", 8 * samples, " --seq ", seq);
}

// --- DataParallel ------------------------------------------------------------

/// 0, 1, 2, ... as rows of two.
inline Tensor rows_of_two(std::int64_t rows, const Device& device) {
  const TensorOptions options{DType::kF32, device};
  return reshape(Tensor::arange(2 * rows, options), {rows, 2});
}

/// The rows that each device gets.
inline Picture shares(std::int64_t rows, int num_devices) {
  Rows lines = {{"device", "rows"}};
  for (const auto& [begin, end] :
       data_parallel::ceil_chunks(rows, num_devices)) {
    lines.push_back(cells(lines.size() - 1, joined(begin, " to ", end - 1)));
  }
  return table(lines);
}

/// One forward and backward.
struct Step {
  std::vector<std::vector<CommRecord>> records = {};  ///< by device
  Tensor gradient = {};                               ///< of the weight
};

inline std::vector<std::vector<CommRecord>> records_of(
    const data_parallel::DataParallel& model) {
  return mapped(model.device_ids(), [&](const Device& device) {
    return model.ledger()->records(device);
  });
}

/// The bytes that each device sends, a line per copy.
inline Picture sent(const Step& step) {
  Rows rows = {{"copy", "for"}};
  for (std::size_t device = 0; device < step.records.size(); ++device) {
    rows[0].push_back(joined("device ", device));
  }
  for (std::size_t i = 0; i < step.records[0].size(); ++i) {
    const CommRecord& record = step.records[0][i];
    rows.push_back({comm_op_name(record.op), record.label});
    for (const auto& records : step.records) {
      rows.back().push_back(fixed(bytes_sent(records[i]), 0));
    }
  }
  return table(rows);
}

/// The bytes that leave device 0, and those that leave each device of a ring.
inline Picture hot_spot(std::int64_t batch, const std::vector<int>& sizes) {
  std::vector<Bar> all;
  for (const int d : sizes) {
    const Options options = options_of(joined(
        "01_data_parallel", kSmall, " --batch ", batch, " --world-size ", d));
    const LoadedModel loaded = build_model(options);
    const double weights =
        4.0 * static_cast<double>(loaded.model->num_parameters());
    all.push_back(
        {joined(d, " devices, device 0"),
         data_parallel::step_traffic(options, loaded.config)[0].total()});
    all.push_back({joined(d, " devices, a ring"), 2.0 * (d - 1) / d * weights});
  }
  return bars("Device 0 sends more with every device, a ring hardly", all,
              {"KiB", 1024}, "comm");
}

/// The step of one device over that of several, for the same batch of GPT-2,
/// whose samples have 1024 tokens.
inline Picture speedups(int devices, const std::vector<int>& samples,
                        double limit) {
  std::vector<Bar> all;
  for (const int each : samples) {
    const std::string line =
        joined("01_data_parallel --model gpt2 --seq 1024 --steps 3 --no-check",
               kTextbook, " --batch ", devices * each, " --world-size ");
    all.push_back(
        {std::to_string(1024 * each),
         step_s(run(line + "1")) / step_s(run(joined(line, devices)))});
  }
  return curve(joined("Few tokens per device make ", devices,
                      " devices slower than one"),
               all, "tokens each", {"one device", 1},
               {"limit for any number of devices", limit}, {"", 1});
}

/// From the chapter's bill, for rows of no bytes: only weights and gradients.
inline double through_main(double d, double weight_bytes) {
  double bytes = 0;
  for (const data_parallel::Traffic& device : data_parallel::step_traffic(
           /*batch=*/static_cast<std::int64_t>(d), static_cast<int>(d), 0, 0,
           weight_bytes, 0)) {
    bytes += device.total();
  }
  return bytes;
}

// --- DDP ---------------------------------------------------------------------

/// Replaces the gradients of a model by their means over the ranks.
using Average = void (*)(Module& model, ProcessGroup& dp);

/// The norm of the gradient of these samples.
inline double backward(Module& model, const Batch& batch) {
  language_loss(model(batch.inputs), batch.targets).backward();
  return grad_norm(model.parameters());
}

/// The norms of three gradients: of this rank's samples, of their average, and
/// of the whole batch on one device.
inline std::vector<double> gradient_norms(ProcessGroup& dp, Average average) {
  Gpt mine(lesson::config(), lesson::init());
  const double own = backward(mine, lesson::batch(0, dp.rank(), dp.size()));
  average(mine, dp);
  Gpt whole(lesson::config(), lesson::init());
  return {own, grad_norm(mine.parameters()), backward(whole, lesson::batch(0))};
}

/// The buckets of the first step, in the order in which they leave.
inline Picture first_buckets(const std::string& line) {
  ddp::StrategyOptions setup;
  const Options options = options_of(line, setup);
  const LoadedModel loaded = build_model(options);
  std::vector<ddp::BucketItem> items;
  for (const Tensor& each : loaded.model->parameters()) {
    items.push_back({each.bytes(), each.dtype(), each.device()});
  }
  const auto bytes = [](double mb) {
    return static_cast<std::int64_t>(mb * (1 << 20));
  };
  std::vector<Bar> all;
  for (const ddp::BucketMembers& bucket :
       ddp::initial_buckets(items, {bytes(setup.ddp.first_bucket_mb),
                                    bytes(setup.ddp.bucket_cap_mb)})) {
    Bar bar;
    for (const int i : bucket) {
      bar.value +=
          static_cast<double>(items[static_cast<std::size_t>(i)].bytes);
    }
    bar.name = joined("bucket ", all.size(), ", tensors: ", bucket.size());
    all.push_back(bar);
  }
  return bars("In the first step, the token table's bucket leaves last", all,
              {"KiB", 1024}, "comm");
}

/// This rank's part of a batch.
inline Batch own_samples(const Options& options, const ModelConfig& config,
                         ProcessGroup& world, int step) {
  return Dataset::open(options, config)
      .batch(step, options.batch, {world.rank(), world.size()},
             options.batch / world.size());
}

/// The time of a step over the size of its buckets.
inline Picture steps_with(const std::string& line,
                          const std::vector<double>& bucket_mbs) {
  const auto bar_of = [&](double mb) {
    return Bar{fixed(mb, mb < 1 ? 3 : 0) + " MiB",
               step_s(run(joined(line, " --first-bucket-mb ", std::min(mb, 1.0),
                                 " --bucket-mb ", mb)))};
  };
  return bars("Small buckets pay latencies, large ones leave late",
              mapped(bucket_mbs, bar_of), {"ms", 1e-3});
}

/// Exposed communication of GPT-2 XL over the tokens of a device. The lines
/// across are the time of all gradients, and that of the last bucket.
inline Picture exposed(const std::vector<std::int64_t>& tokens,
                       double all_gradients_s) {
  const auto bar_of = [](std::int64_t each) {
    return Bar{
        std::to_string(each),
        exposed_s(run("02_ddp --bucket-mb 100" +
                      simulated("textbook", "gpt2-xl", each / 250, 250)))};
  };
  Bar last_bucket = bar_of(3500);
  last_bucket.name = "last bucket";
  return curve("Above 1750 tokens, little more than the last bucket is exposed",
               mapped(tokens, bar_of), "tokens each",
               {"all gradients", all_gradients_s}, last_bucket, {"ms", 1e-3});
}

// --- ZeRO and FSDP -----------------------------------------------------------

/// Elements 0 .. n-1 as a strip: whole on every rank, or cut.
inline dtensor::Held strip(const std::string& name, std::int64_t n, int ranks,
                           bool is_cut) {
  dtensor::Held held = dtensor::held_by(
      name, {1, n}, {is_cut ? dtensor::shard(1) : dtensor::replicate()},
      {ranks});
  held.title = name;
  return held;
}

/// Who holds which of n elements under a stage of ZeRO; stage 0 is DDP.
inline Picture stage(int number, std::int64_t n, int ranks) {
  const char* const cut[] = {"nothing", "the optimizer state",
                             "gradients and optimizer state", "all three"};
  return holders(joined("Stage ", number, " cuts ", cut[number]),
                 {strip("parameters", n, ranks, number >= 3),
                  strip("gradients", n, ranks, number >= 2),
                  strip("optimizer state", n, ranks, number >= 1)});
}

/// The net of PyTorch's post on FSDP.
inline toy::Net three_layers() {
  toy::Torch torch(0);
  toy::Net net;
  net.add("layer1", torch.linear("layer1", 8, 4));
  net.add("layer2", torch.linear("layer2", 4, 16));
  net.add("layer3", torch.linear("layer3", 16, 4));
  return net;
}

/// "layer1 has 36 elements, 18 on each rank", a line for each unit.
inline std::string units_of(const fsdp::FullyShardedDataParallel& model) {
  std::string text;
  for (const fsdp::FlatParameter* unit : model.units()) {
    text += joined(unit->name(), " has ", unit->layout().numel, " elements, ",
                   unit->shard().numel(), " on each rank\n");
  }
  return text;
}

/// "ddp", or a --strategy of this chapter.
inline Report train(const std::string& options, const std::string& strategy) {
  return run(
      (strategy == "ddp" ? "02_ddp" : "03_zero_fsdp --strategy " + strategy) +
      options);
}

/// KiB of rank 0, a row for each strategy.
inline Picture side_by_side(const std::string& options,
                            const std::vector<std::string>& names) {
  const auto row = [&](const std::string& name) {
    const Report report = train(options, name);
    Cells row = {name};
    for (const MemoryKind kind : {MemoryKind::kParameter, MemoryKind::kGradient,
                                  MemoryKind::kOptimizerState}) {
      row.push_back(fixed(peak_of(report, kind) / 1024, 0));
    }
    row.push_back(fixed(sent_bytes(report) / 1024 / kSteps, 0));
    row.push_back(fixed(report.losses.back(), 4));
    row.push_back(report.parity.passed ? "yes" : "NO");
    return row;
  };
  return table_of({"strategy", "parameters", "gradients", "optimizer",
                   "sent per step", "last loss", "like one device"},
                  names, row);
}

/// "fsdp trains: loss 4.6915", or the reason why the run stopped.
inline std::string try_to_train(const std::string& strategy_name,
                                std::int64_t device_bytes) {
  try {
    const Report report =
        train(joined(kSmall, " --device-memory ", device_bytes), strategy_name);
    return strategy_name + " trains: loss " + fixed(report.losses.back(), 4) +
           "\n";
  } catch (const Error& error) {
    return strategy_name +
           " stops: " + std::string(error.what()).substr(0, 60) + "...\n";
  }
}

}  // namespace notes
