#pragma once

// What the notebook 03_zero_fsdp calls: pictures of shards, runs of DDP, ZeRO
// and FSDP, and tables of their results.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/common/toy.h"
#include "chapters/programs/programs.h"
#include "core/check.h"
#include "notebooks/lessons.h"

namespace notes {

using namespace shardbook::notebook;

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

constexpr int kSteps = 8;
/// On four ranks of this process.
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

/// The time of a step as a bar.
inline Bar step_bar(const std::string& name, const Report& report) {
  return {name, report.time.step_s};
}

/// Two all-gathers and a reduce-scatter, as the ledger books them.
inline double three_calls(double psi, double d, double e) {
  return e * (2 * booked_elements(CommOp::kAllGather, psi, d) +
              booked_elements(CommOp::kReduceScatter, psi, d));
}

}  // namespace notes
