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
  return table_of(
      {"axis", "groups", "cross nodes"}, split_axes("tp-dp-pp"),
      [&](const std::string& axis) {
        std::string text;
        int crossing = 0;
        const std::vector<std::vector<int>> groups = mesh.groups({axis});
        for (const std::vector<int>& group : groups) {
          text += (text.empty() ? "" : " ") + group_text(group);
          crossing +=
              group.front() / ranks_per_node != group.back() / ranks_per_node;
        }
        return cells(axis, text, joined(crossing, " of ", groups.size()));
      });
}

/// The rank with the same part of the model in the other of two replicas.
inline double peer_of(const Topology& mesh, int rank) {
  Coord at = mesh.get_coord(rank);
  at["dp"] = 1 - at["dp"];
  return mesh.get_rank(at);
}

/// A training of a moment.
inline const std::string kSmall =
    " --world-size 8 --batch 16 --steps 6" + kNano;

/// The options of a line, with all degrees.
inline Options legal_options_of(const std::string& line,
                                hybrid::HybridOptions& setup) {
  const Options options = options_of(line, setup);
  hybrid::check_legal(options, setup);
  return options;
}

// ---- Whose gradient?

/// A column of eight digits for each title, a row for each rank.
inline Picture digits_table(const std::vector<std::string>& titles,
                            const std::vector<std::vector<double>>& columns) {
  Rows rows = {{"rank"}};
  rows[0].insert(rows[0].end(), titles.begin(), titles.end());
  for (std::size_t rank = 0; rank < columns[0].size(); ++rank) {
    rows.push_back(cells(rank));
    for (const std::vector<double>& column : columns) {
      // A leading 1 keeps the zeros
      rows.back().push_back(fixed(1e9 + column[rank], 0).substr(2));
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
                                          const std::string& line) {
  hybrid::HybridOptions setup;
  const Options options = legal_options_of(line, setup);
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
      rows.push_back(cells(rank, line.first, line.numel,
                           line.is_replicated ? "the whole" : "parts",
                           line.summed, line.counts ? "yes" : "no"));
    }
  }
  return table(rows);
}

/// Elements that ranks count, by the right rule and by two wrong ones.
inline Picture counted(const Buckets& ranks, int tp) {
  std::int64_t right = 0, without_tp = 0, all = 0;
  for (const std::vector<BucketLine>& lines : ranks) {
    for (const BucketLine& line : lines) {
      all += line.numel;
      if (!line.counts) continue;
      right += line.numel;
      without_tp += line.is_replicated ? tp * line.numel : line.numel;
    }
  }
  const LoadedModel loaded = build_model(options_of("14_hybrid_3d" + kSmall));
  return table({{"rule", "elements"},
                cells("the model has", loaded.model->num_parameters()),
                cells("each once", right),
                cells("what tp holds whole, on every rank of tp", without_tp),
                cells("everything, on every rank", all)});
}

// ---- Runs

/// The ledger of this rank for one step.
inline std::vector<CommRecord> calls_of_step(ProcessGroup& world,
                                             const std::string& line) {
  hybrid::HybridOptions setup;
  const Options options = legal_options_of(line, setup);
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

/// 13 billion parameters with ZeRO-1 on the shapes of 64 A100, eight in a node.
inline Report try_degrees(int tp, int pp) {
  const int dp = 64 / (tp * pp);
  return run(
      joined("14_hybrid_3d --world-size 64 --model gpt-13b --dtype bf16 "
             "--batch 64 --seq 1024 --steps 2 --zero-stage 1 --tp ",
             tp, " --pp ", pp, " --micro-batches ", 64 / dp, kA100s));
}

/// On the fullest rank.
inline double most_bytes(const Report& report) {
  return most_of(
      report, [](const RankReport& rank) { return rank.peak_total.counted; });
}

inline Picture compare(const std::vector<std::pair<int, int>>& choices) {
  const auto row = [](const std::pair<int, int>& choice) {
    const auto& [tp, pp] = choice;
    const Report report = try_degrees(tp, pp);
    return cells(tp, pp, 64 / (tp * pp), ms(step_s(report), 0),
                 percent(idle_share(report), 1), gib(most_bytes(report), 1));
  };
  return table_of({"tp", "pp", "dp", "step", "idle", "memory"}, choices, row);
}

/// Whether a step takes less than 825 ms with at most 10 GiB on each rank.
/// Prints why degrees do not suit the model.
inline bool are_good(double my_tp, double my_pp) {
  const int tp = static_cast<int>(my_tp), pp = static_cast<int>(my_pp);
  const bool are_degrees = tp == my_tp && pp == my_pp && tp > 0 && pp > 0 &&
                           std::fmod(64, my_tp * my_pp) == 0;
  if (!are_degrees) return false;
  try {
    const Report report = try_degrees(tp, pp);
    return step_s(report) < 0.825 && most_bytes(report) <= 10.0 * (1 << 30);
  } catch (const std::exception& error) {
    std::cout << error.what() << "\n";
    return false;
  }
}

// ---- More devices for one batch

/// A step of GPT 6.7B on the shapes of the cluster `textbook`, with 65 536
/// tokens: with ZeRO-3, and with two ranks per layer and four stages.
inline Picture two_ways(const std::vector<int>& all) {
  const auto row = [](int devices) {
    const std::string options =
        joined(kTextbook, " --model gpt-6.7b --batch 256 --seq 256 --steps 2",
               " --world-size ", devices);
    const std::string degrees =
        joined(" --zero-stage 1 --overlap-grad-reduce --tp 2 --pp 4",
               " --micro-batches ", std::min(16, 256 * 8 / devices));
    return cells(devices, ms(step_s(run("03_zero_fsdp" + options)), 0),
                 ms(step_s(run("14_hybrid_3d" + options + degrees)), 0));
  };
  return table_of({"devices", "ZeRO-3", "tp 2 x pp 4 x dp"}, all, row);
}

}  // namespace notes
