#pragma once

// What the notebook side_by_side calls: every strategy of the book on the same
// model, their runs, and pictures and tables that compare them.

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"
#include "chapters/programs/programs.h"
#include "comm/device_mesh.h"
#include "comm/ledger.h"
#include "notebooks/lessons.h"

namespace notes {

using namespace shardbook::notebook;

// --- Runs --------------------------------------------------------------------

struct Training {
  std::string options;
  int steps;
};
/// A small GPT on a random walk, for a moment on live ranks.
inline const Training kLive = {"--dtype f64 --batch 8" + kNano, 4};
/// GPT-2 large in bf16 on simulated A100s.
inline const Training kLarge = {
    "--model gpt2-large --dtype bf16 --batch 16 --seq 1024" + kA100s, 2};

struct Row {
  std::string name = "";
  int ranks = 0, steps = 0;
  Report report = {};
};

/// The end of a line.
inline std::string on(int ranks, const Training& training) {
  return joined(" ", training.options, " --steps ", training.steps,
                " --world-size ", ranks);
}

/// Trains on live ranks, each of which calls this function, and compares with
/// one device that has the whole batch.
inline Row run(
    const std::string& name, int ranks,
    const std::function<void(const Options&, ProcessGroup&, Run&)>& rank) {
  ChapterRun chapter;
  chapter.rank = rank;
  chapter.reference = [](const Options& alone) {
    return train_one_device(alone);
  };
  const Options options = options_of("side_by_side" + on(ranks, kLive));
  return {name, ranks, kLive.steps, run_and_compare(options, chapter)};
}

/// All strategies.
inline std::vector<Row> run_all(const Training& training) {
  std::vector<Row> rows;
  for (const auto& [name, ranks, line] :
       std::vector<std::tuple<const char*, int, const char*>>{
           {"one device", 1, "00_single_device"},
           {"DataParallel", 4, "01_data_parallel"},
           {"DDP", 4, "02_ddp"},
           {"ZeRO-1", 4, "03_zero_fsdp --strategy zero1"},
           {"ZeRO-2", 4, "03_zero_fsdp --strategy zero2"},
           {"ZeRO-3", 4, "03_zero_fsdp --strategy zero3"},
           {"FSDP", 4, "03_zero_fsdp --strategy fsdp"},
           {"GPipe", 4, "05_gpipe --micro-batches 4"},
           {"1F1B", 4, "06_1f1b --schedule 1f1b --micro-batches 4"},
           {"ZB-H1", 4, "06_1f1b --schedule zb-h1 --micro-batches 4"},
           {"tensor parallel", 4, "07_tensor_parallel"},
           {"2D", 4, "08_tensor_parallel_2d"},
           {"2.5D", 8, "09_tensor_parallel_2p5d --depth 2"},
           {"3D", 8, "10_tensor_parallel_3d"},
           {"DTensor 2x2", 4, "11_dtensor --mesh 2x2 --data-parallel ddp"},
           {"ring attention", 4,
            "12_sequence_parallel --kind ring --layout zigzag"},
           {"Ulysses", 4, "12_sequence_parallel --kind ulysses"},
           {"dp x tp x pp", 8, "14_hybrid_3d --tp 2 --pp 2 --zero-stage 1"}}) {
    rows.push_back({name, ranks, training.steps,
                    shardbook::run(line + on(ranks, training))});
  }
  return rows;
}

/// The row with this name; the first one if there is none.
inline const Row& row_of(const std::vector<Row>& all, const std::string& name) {
  for (const Row& row : all) {
    if (row.name == name) return row;
  }
  return all[0];
}

// --- What they need ----------------------------------------------------------

/// Bytes per step of the rank that sends the most.
inline double most_bytes(const Row& row) {
  return most_of(row.report,
                 [](const RankReport& rank) { return rank.bytes.counted; }) /
         row.steps;
}

using Kinds = std::vector<MemoryKind>;
inline const Kinds kKinds = {MemoryKind::kParameter, MemoryKind::kGradient,
                             MemoryKind::kOptimizerState,
                             MemoryKind::kActivation};

/// The sum of the peaks of some kinds, on the fullest rank.
inline double most_memory(const Report& report, const Kinds& kinds = kKinds) {
  return most_of(report, [&](const RankReport& rank) {
    double sum = 0;
    for (const MemoryKind kind : kinds) sum += peak_of(rank, kind);
    return sum;
  });
}

// --- Pictures and tables -----------------------------------------------------

/// Losses, and whether the weights equal those of one device.
inline Picture numbers(const std::vector<Row>& all) {
  return table_of(
      {"strategy", "ranks", "first loss", "last loss", "weights"}, all,
      [](const Row& row) {
        return cells(row.name, row.ranks, fixed(row.report.losses.front(), 10),
                     fixed(row.report.losses.back(), 10),
                     row.report.parity.passed ? "equal" : "DIFFERENT");
      });
}

inline Picture bytes_bars(const std::string& title,
                          const std::vector<Row>& all) {
  const auto bar_of = [](const Row& row) {
    return Bar{row.name, most_bytes(row)};
  };
  return bars(title, mapped(all, bar_of), {"MiB", 1 << 20}, "comm");
}

inline Picture memory_bars(const std::string& title,
                           const std::vector<Row>& all) {
  const auto bar_of = [](const Row& row) {
    return Bar{row.name, most_memory(row.report)};
  };
  return bars(title, mapped(all, bar_of), {"MiB", 1 << 20}, "space");
}

inline Picture step_bars(const std::string& title,
                         const std::vector<Row>& all) {
  const auto bar_of = [](const Row& row) {
    const std::string ranks =
        row.ranks == 1 ? "" : joined(", ", row.ranks, " ranks");
    return Bar{row.name + ranks, step_s(row.report)};
  };
  return bars(title, mapped(all, bar_of), {"ms", 1e-3}, "time");
}

/// By kind, of the fullest rank of each strategy.
inline Picture memory_table(const std::vector<Row>& all) {
  return table_of(
      {"strategy", "parameters", "gradients", "optimizer", "activations"}, all,
      [](const Row& row) {
        Cells line = {row.name};
        for (const MemoryKind kind : kKinds) {
          const double bytes = most_memory(row.report, {kind});
          line.push_back(fixed(bytes / (1 << 20), 2) + " MiB");
        }
        return line;
      });
}

/// Time, bytes per step and memory of a simulated step.
inline Picture costs(const std::vector<Row>& all) {
  return table_of(
      {"strategy", "ranks", "step", "speed-up", "idle", "sent", "memory"}, all,
      [&](const Row& row) {
        const double seconds = step_s(row.report);
        return cells(row.name, row.ranks, ms(seconds, 0),
                     fixed(step_s(all[0].report) / seconds, 2),
                     percent(idle_share(row.report), 0),
                     gib(most_bytes(row), 2), gib(most_memory(row.report), 2));
      });
}

// --- The exercises -----------------------------------------------------------

/// Whether no other strategy on four ranks that fits is faster.
inline bool is_fastest(const std::vector<Row>& all, const std::string& name,
                       double gibibytes) {
  const auto fits = [&](const Row& row) {
    return row.ranks == 4 && most_memory(row.report) < gibibytes * (1 << 30);
  };
  const Row& mine = row_of(all, name);
  if (mine.name != name || !fits(mine)) return false;
  for (const Row& row : all) {
    const bool is_faster = row.report.time.step_s < mine.report.time.step_s;
    if (fits(row) && is_faster) return false;
  }
  return true;
}

}  // namespace notes
