#pragma once

// What the notebook 14_hybrid_3d calls: meshes and their groups, the buckets of
// live ranks, runs on ranks and on shapes, and tables of their results.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/programs/programs.h"
#include "comm/device_mesh.h"
#include "notebooks/lessons.h"

namespace notes {

using namespace shardbook::notebook;

inline std::string group_text(const std::vector<int>& ranks) {
  std::string text = "{";
  for (const int rank : ranks) {
    text += (text.size() > 1 ? " " : "") + std::to_string(rank);
  }
  return text + "}";
}

/// The groups of each axis, and how many of them leave their node.
inline Picture groups_table(const Topology& mesh, int ranks_per_node) {
  Rows rows = {{"axis", "groups", "cross nodes"}};
  for (const std::string& axis : split_axes("tp-dp-pp")) {
    std::string text;
    int crossing = 0, all = 0;
    for (const std::vector<int>& group : mesh.groups({axis})) {
      text += (text.empty() ? "" : " ") + group_text(group);
      all += 1;
      crossing +=
          group.front() / ranks_per_node != group.back() / ranks_per_node;
    }
    rows.push_back({axis, text, joined(crossing, " of ", all)});
  }
  return table(rows);
}

/// The rank with the same part of the model in the other of two replicas.
inline double peer_of(const Topology& mesh, int rank) {
  for (const std::vector<int>& pair : mesh.groups({"dp"})) {
    if (pair[0] == rank) return pair[1];
    if (pair[1] == rank) return pair[0];
  }
  return 0;
}

inline Options small_options() {
  return nano_options("14_hybrid_3d", 8, 16, 6);
}

/// dp follows from the world size.
inline hybrid::HybridOptions degrees(int tp, int pp, int zero_stage,
                                     std::int64_t micro_batches) {
  hybrid::HybridOptions setup;
  setup.tp = tp;
  setup.pp = pp;
  setup.zero_stage = zero_stage;
  setup.micro_batches = micro_batches;
  return setup;
}

/// The options of ZeRO-1 on these degrees.
inline std::string degrees_text(int tp, int pp, int micro_batches) {
  return joined("--zero-stage 1 --tp ", tp, " --pp ", pp, " --micro-batches ",
                micro_batches);
}

/// The run of small_options().
inline const std::string kSmall =
    " --model gpt-nano --data walk --world-size 8 --batch 16 --seq 32 --steps "
    "6";

// ---- Whose gradient?

/// A column of eight digits for each title, a row for each rank.
inline Picture digits_table(const std::vector<std::string>& titles,
                            const std::vector<std::vector<double>>& columns) {
  Rows rows = {{"rank"}};
  rows[0].insert(rows[0].end(), titles.begin(), titles.end());
  for (std::size_t rank = 0; rank < columns[0].size(); ++rank) {
    rows.push_back({std::to_string(rank)});
    for (const std::vector<double>& column : columns) {
      const std::string digits = fixed(column[rank], 0);
      const std::size_t zeros = digits.size() < 8 ? 8 - digits.size() : 0;
      rows.back().push_back(std::string(zeros, '0') + digits);
    }
  }
  return table(rows);
}

/// Parameters whose gradients are summed over the same ranks.
struct BucketLine {
  std::string first = "";   ///< its first parameter
  std::string summed = "";  ///< the groups of the sums
  std::int64_t numel = 0;
  bool is_replicated = false, counts = false;
};

using Buckets = std::vector<std::vector<BucketLine>>;

inline std::vector<BucketLine> buckets_of(ProcessGroup& world,
                                          const Options& options,
                                          hybrid::HybridOptions setup) {
  hybrid::check_legal(options, setup);
  DeviceMesh mesh(world, hybrid::topology_of(setup));
  hybrid::HybridStrategy strategy(options, setup, mesh);
  std::vector<BucketLine> lines;
  for (const hybrid::UpdateBucket& bucket : strategy.update().buckets()) {
    std::string summed = group_text(bucket.data->ranks());
    if (bucket.is_partial) summed += " " + group_text(mesh.group("tp").ranks());
    if (bucket.tied != nullptr)
      summed += " " + group_text(bucket.tied->ranks());
    lines.push_back({bucket.parameters[0].name, summed, bucket.numel(),
                     bucket.is_replicated, bucket.counts});
  }
  return lines;
}

inline Picture buckets_table(const Buckets& ranks) {
  Rows rows = {
      {"rank", "bucket of", "elements", "tp holds", "summed over", "counts"}};
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const BucketLine& line : ranks[rank]) {
      rows.push_back({std::to_string(rank), line.first,
                      std::to_string(line.numel),
                      line.is_replicated ? "the whole" : "parts", line.summed,
                      line.counts ? "yes" : "no"});
    }
  }
  return table(rows);
}

/// Elements that ranks count, by the right rule and by two wrong ones.
inline Picture counted(const Buckets& ranks, const Options& options, int tp) {
  std::int64_t right = 0, without_tp = 0, all = 0;
  for (const std::vector<BucketLine>& lines : ranks) {
    for (const BucketLine& line : lines) {
      all += line.numel;
      if (!line.counts) continue;
      right += line.numel;
      without_tp += line.is_replicated ? tp * line.numel : line.numel;
    }
  }
  return table(
      {{"rule", "elements"},
       {"the model has",
        std::to_string(build_model(options).model->num_parameters())},
       {"each once", std::to_string(right)},
       {"what tp holds whole, on every rank of tp", std::to_string(without_tp)},
       {"everything, on every rank", std::to_string(all)}});
}

// ---- Runs

/// The ledger of this rank for one step.
inline std::vector<CommRecord> calls_of_step(ProcessGroup& world,
                                             const Options& options,
                                             hybrid::HybridOptions setup) {
  hybrid::check_legal(options, setup);
  DeviceMesh mesh(world, hybrid::topology_of(setup));
  const auto strategy = hybrid::make_strategy(options, setup, mesh);
  world.clear_records();
  strategy->step(0);
  return world.records();
}

inline Picture bytes_by_group(const std::vector<CommRecord>& records) {
  std::vector<Bar> all;
  for (const CommRecord& record : records) {
    const double bytes = wire_bytes(record);
    if (bytes == 0) continue;
    auto place = std::find_if(all.begin(), all.end(), [&](const Bar& bar) {
      return bar.name == record.group;
    });
    if (place == all.end()) {
      place = all.insert(all.end(), {record.group, 0, 0, ""});
    }
    place->value += bytes;
  }
  return bars("Tensor parallelism sends the most", all, {"KiB", 1024}, "comm");
}

struct Outcome {
  double step_s = 0, idle_share = 0, bytes = 0;
};

inline Outcome try_degrees(int tp, int pp) {
  // 13 billion parameters on the shapes of 64 A100, eight in a node
  const int dp = 64 / (tp * pp);
  const Report report = run(
      "14_hybrid_3d --backend sim --cluster dgx-a100 --world-size 64 --model "
      "gpt-13b --dtype bf16 --data random --batch 64 --seq 1024 --steps 2 " +
      degrees_text(tp, pp, 64 / dp));
  Outcome outcome = {report.time.step_s, report.time.idle_share, 0};
  for (const RankReport& rank : report.ranks) {
    outcome.bytes = std::max(outcome.bytes, rank.peak_total.counted);
  }
  return outcome;
}

inline Picture compare(const std::vector<std::pair<int, int>>& choices) {
  Rows rows = {{"tp", "pp", "dp", "step", "idle", "memory"}};
  for (const auto& [tp, pp] : choices) {
    const Outcome outcome = try_degrees(tp, pp);
    rows.push_back({std::to_string(tp), std::to_string(pp),
                    std::to_string(64 / (tp * pp)), ms(outcome.step_s, 0),
                    percent(outcome.idle_share, 1), gib(outcome.bytes, 1)});
  }
  return table(rows);
}

/// Whether a step takes less than 825 ms with at most 10 GiB on each rank.
/// Prints why degrees do not suit the model.
inline bool are_good(double my_tp, double my_pp) {
  const int tp = static_cast<int>(my_tp), pp = static_cast<int>(my_pp);
  const bool are_degrees = tp == my_tp && pp == my_pp && tp > 0 && pp > 0 &&
                           std::fmod(64, my_tp * my_pp) == 0;
  if (!are_degrees) return false;
  try {
    const Outcome outcome = try_degrees(tp, pp);
    return outcome.step_s < 0.825 && outcome.bytes <= 10.0 * (1 << 30);
  } catch (const std::exception& error) {
    std::cout << error.what() << "\n";
    return false;
  }
}

// ---- More devices for one batch

/// GPT 6.7B on the shapes of the cluster `textbook`, 65 536 tokens per step.
inline double step_s(const std::string& chapter, int devices) {
  return run(joined(chapter,
                    " --backend sim --cluster textbook --model gpt-6.7b --data "
                    "random --batch 256 --seq 256 --steps 2 --world-size ",
                    devices))
      .time.step_s;
}

/// Two ranks per layer and four stages; the other devices are replicas.
inline double hybrid_step_s(int devices) {
  const int micro_batches = std::min(16, 256 * 8 / devices);
  return step_s(
      "14_hybrid_3d --overlap-grad-reduce " + degrees_text(2, 4, micro_batches),
      devices);
}

inline Picture two_ways(const std::vector<int>& devices) {
  Rows rows = {{"devices", "ZeRO-3", "tp 2 x pp 4 x dp"}};
  for (const int each : devices) {
    rows.push_back({std::to_string(each), ms(step_s("03_zero_fsdp", each), 0),
                    ms(hybrid_step_s(each), 0)});
  }
  return table(rows);
}

}  // namespace notes
