#pragma once

// What the notebook side_by_side calls: every strategy of the book on the same
// model, their runs, and pictures and tables that compare them.

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "chapters/00_single_device/single_device.h"
#include "chapters/01_data_parallel/data_parallel_strategy.h"
#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/06_1f1b/pipeline_strategy.h"
#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"
#include "chapters/08_tensor_parallel_2d/summa_strategy.h"
#include "chapters/09_tensor_parallel_2p5d/tesseract.h"
#include "chapters/10_tensor_parallel_3d/cube_strategy.h"
#include "chapters/11_dtensor/dtensor_strategy.h"
#include "chapters/12_sequence_parallel/sequence_strategy.h"
#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"
#include "comm/ledger.h"
#include "notebooks/display.h"

namespace notes {

using namespace shardbook;
using namespace shardbook::notebook;

// --- The strategies ----------------------------------------------------------

using RankFunction =
    std::function<void(const Options&, ProcessGroup& world, Run&)>;

/// Every rank calls this function; one device trains the whole batch for
/// comparison.
inline ChapterRun program(const RankFunction& rank) {
  ChapterRun chapter;
  chapter.rank = rank;
  chapter.reference = [](const Options& options) {
    return train_one_device(options);
  };
  return chapter;
}

inline ChapterRun single_device() {
  return program([](const Options& options, ProcessGroup&, Run& run) {
    single_device::SingleDevice strategy(options, {});
    run.train(options, strategy);
  });
}

inline ChapterRun data_parallel() {
  ChapterRun chapter = program(nullptr);
  chapter.devices = [](const Options& options,
                       const std::vector<Device>& devices, Run& run) {
    data_parallel::DataParallelStrategy strategy(options, devices);
    run.train(options, strategy);
  };
  return chapter;
}

inline ChapterRun ddp() {
  return program([](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));
    ddp::DdpStrategy strategy(options, {}, mesh.group("dp"));
    run.train(options, strategy);
  });
}

/// "zero1", "zero2", "zero3" or "fsdp".
inline ChapterRun zero(const std::string& stage) {
  zero_fsdp::StrategyOptions setup;
  setup.strategy = stage;
  return program(
      [setup](const Options& options, ProcessGroup& world, Run& run) {
        DeviceMesh mesh(world, Topology({"dp"}, {world.size()}));
        zero_fsdp::ZeroFsdpStrategy strategy(options, setup, mesh.group("dp"));
        run.train(options, strategy);
      });
}

inline ChapterRun gpipe() {
  gpipe::StrategyOptions setup;
  setup.micro_batches = 4;
  ChapterRun chapter =
      program([setup](const Options& options, ProcessGroup& world, Run& run) {
        DeviceMesh mesh(world, Topology({"pp"}, {world.size()}));
        gpipe::GpipeStrategy strategy(options, setup, mesh.group("pp"));
        run.train(options, strategy);
      });
  chapter.fold_class = each_rank;
  chapter.reference = [setup](const Options& options) {
    return gpipe::train_one_device_in_reverse(options, setup);
  };
  return chapter;
}

/// "1f1b", "zb-h1" and others; `options` have the number of ranks.
inline ChapterRun pipeline(const Options& options,
                           const std::string& schedule) {
  pipeline::StrategyOptions setup;
  setup.schedule = schedule;
  setup.micro_batches = 4;
  const pipeline::Plan plan = pipeline::make_plan(options, setup);
  ChapterRun chapter = program([setup, plan](const Options& options,
                                             ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, Topology({"pp"}, {world.size()}));
    pipeline::PipelineStrategy strategy(options, setup, plan, mesh.group("pp"));
    run.train(options, strategy);
  });
  chapter.fold_class = each_rank;
  chapter.reference = [setup, plan](const Options& options) {
    return pipeline::reference_run(options, setup, plan);
  };
  return chapter;
}

inline ChapterRun tensor_parallel() {
  return program([](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, Topology({"tp"}, {world.size()}));
    tensor_parallel::TensorParallelStrategy strategy(options, {},
                                                     mesh.group("tp"));
    run.train(options, strategy);
  });
}

/// 2D with depth 1, else 2.5D.
inline ChapterRun squares(int depth) {
  return program(
      [depth](const Options& options, ProcessGroup& world, Run& run) {
        const int q = summa::side_of(world.size(), depth, "ranks");
        DeviceMesh mesh(world, depth == 1 ? summa::square(q)
                                          : tesseract::squares(q, depth));
        summa::SummaStrategy strategy(options, summa::grid_of(mesh), world);
        run.train(options, strategy);
      });
}

inline ChapterRun cube() {
  return program([](const Options& options, ProcessGroup& world, Run& run) {
    const int side = cube::side_of(world.size(), "ranks");
    DeviceMesh mesh(world, cube::cube_of(side));
    cube::CubeStrategy strategy(options, cube::cube_on(mesh), world);
    run.train(options, strategy);
  });
}

/// `sizes` of the mesh: "2x2" are two replicas of two tensor-parallel ranks.
inline ChapterRun dtensor(const std::string& sizes) {
  dtensor::StrategyOptions setup;
  setup.mesh = sizes;
  setup.data_parallel = "ddp";
  return program(
      [setup](const Options& options, ProcessGroup& world, Run& run) {
        DeviceMesh mesh(world, dtensor::topology_of(setup, world.size()));
        dtensor::DTensorStrategy strategy(options, setup, mesh);
        run.train(options, strategy);
      });
}

inline ChapterRun sequence(sequence_parallel::Kind kind,
                           sequence_parallel::Layout layout) {
  sequence_parallel::StrategyOptions setup;
  setup.sequence.kind = kind;
  setup.sequence.layout = layout;
  ChapterRun chapter =
      program([setup](const Options& options, ProcessGroup& world, Run& run) {
        DeviceMesh mesh(world, Topology({"cp"}, {world.size()}));
        sequence_parallel::SequenceStrategy strategy(options, setup,
                                                     mesh.group("cp"));
        run.train(options, strategy);
      });
  chapter.fold_class = sequence_parallel::fold_class(setup);
  return chapter;
}

inline ChapterRun hybrid(const Options& options, int tp, int pp,
                         int zero_stage) {
  hybrid::HybridOptions setup;
  setup.tp = tp;
  setup.pp = pp;
  setup.zero_stage = zero_stage;
  hybrid::check_legal(options, setup);
  ChapterRun chapter =
      program([setup](const Options& options, ProcessGroup& world, Run& run) {
        DeviceMesh mesh(world, hybrid::topology_of(setup));
        const auto strategy = hybrid::make_strategy(options, setup, mesh);
        run.train(options, *strategy);
      });
  chapter.fold_class = hybrid::fold_class(setup);
  chapter.reference = [setup](const Options& options) {
    return hybrid::reference_run(options, setup);
  };
  return chapter;
}

// --- Their runs --------------------------------------------------------------

/// A small GPT on a random walk, for a moment on live ranks.
inline Options live_options() {
  Options options;
  options.chapter = "side_by_side";
  options.model = "gpt-nano";
  options.data = "walk";
  options.dtype = DType::kF64;
  options.batch = 8;
  options.seq = 32;
  options.steps = 4;
  return options;
}

/// GPT-2 large in bf16 on simulated A100s.
inline Options large_options() {
  Options options = live_options();
  options.backend = "sim";
  options.cluster = "dgx-a100";
  options.model = "gpt2-large";
  options.data = "random";
  options.dtype = DType::kBF16;
  options.batch = 16;
  options.seq = 1024;
  options.steps = 2;
  return options;
}

struct Row {
  std::string name = "";
  int ranks = 0;
  double steps = 0;
  Report report = {};
};

/// Trains with a strategy, and one device with the same samples.
inline Row run(const std::string& name, int ranks, Options options,
               const ChapterRun& chapter) {
  options.world_size = ranks;
  return {name, ranks, static_cast<double>(options.steps),
          run_and_compare(options, chapter)};
}

/// All strategies with these options.
inline std::vector<Row> run_all(Options options) {
  std::vector<Row> rows;
  const auto with = [&](int ranks) {
    options.world_size = ranks;
    return options;
  };
  const auto add = [&](const char* name, int ranks, const ChapterRun& chapter) {
    rows.push_back(run(name, ranks, options, chapter));
  };
  using sequence_parallel::Kind;
  using sequence_parallel::Layout;
  add("one device", 1, single_device());
  add("DataParallel", 4, data_parallel());
  add("DDP", 4, ddp());
  add("ZeRO-1", 4, zero("zero1"));
  add("ZeRO-2", 4, zero("zero2"));
  add("ZeRO-3", 4, zero("zero3"));
  add("FSDP", 4, zero("fsdp"));
  add("GPipe", 4, gpipe());
  add("1F1B", 4, pipeline(with(4), "1f1b"));
  add("ZB-H1", 4, pipeline(with(4), "zb-h1"));
  add("tensor parallel", 4, tensor_parallel());
  add("2D", 4, squares(1));
  add("2.5D", 8, squares(2));
  add("3D", 8, cube());
  add("DTensor 2x2", 4, dtensor("2x2"));
  add("ring attention", 4, sequence(Kind::kRing, Layout::kZigzag));
  add("Ulysses", 4, sequence(Kind::kUlysses, Layout::kContiguous));
  add("dp x tp x pp", 8, hybrid(with(8), 2, 2, 1));
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

inline double peak(const RankReport& rank, MemoryKind kind) {
  return rank.peak[static_cast<std::size_t>(kind)].counted;
}

/// Bytes per step of the rank that sends the most.
inline double most_bytes(const Row& row) {
  double most = 0;
  for (const RankReport& rank : row.report.ranks) {
    most = std::max(most, rank.bytes.counted);
  }
  return most / row.steps;
}

/// The largest peak of one kind on any rank.
inline double most_of(const Report& report, MemoryKind kind) {
  double most = 0;
  for (const RankReport& rank : report.ranks) {
    most = std::max(most, peak(rank, kind));
  }
  return most;
}

/// The sum of the peaks of parameters, gradients, optimizer and activations, on
/// the fullest rank.
inline double most_memory(const Report& report) {
  double most = 0;
  for (const RankReport& rank : report.ranks) {
    most = std::max(most, peak(rank, MemoryKind::kParameter) +
                              peak(rank, MemoryKind::kGradient) +
                              peak(rank, MemoryKind::kOptimizerState) +
                              peak(rank, MemoryKind::kActivation));
  }
  return most;
}

// --- Pictures and tables -----------------------------------------------------

/// Losses, and whether the weights equal those of one device.
inline Picture numbers(const std::vector<Row>& all) {
  std::vector<std::vector<std::string>> rows = {
      {"strategy", "ranks", "first loss", "last loss", "weights"}};
  for (const Row& row : all) {
    rows.push_back({row.name, std::to_string(row.ranks),
                    fixed(row.report.losses.front(), 10),
                    fixed(row.report.losses.back(), 10),
                    row.report.parity.passed ? "equal" : "DIFFERENT"});
  }
  return table(rows);
}

inline Picture bytes_bars(const std::string& title,
                          const std::vector<Row>& all) {
  std::vector<Bar> list;
  for (const Row& row : all) list.push_back({row.name, most_bytes(row)});
  return bars(title, list, {"MiB", 1 << 20}, "comm");
}

inline Picture memory_bars(const std::string& title,
                           const std::vector<Row>& all) {
  std::vector<Bar> list;
  for (const Row& row : all)
    list.push_back({row.name, most_memory(row.report)});
  return bars(title, list, {"MiB", 1 << 20}, "space");
}

inline Picture step_bars(const std::string& title,
                         const std::vector<Row>& all) {
  std::vector<Bar> list;
  for (const Row& row : all) {
    list.push_back({row.ranks == 1 ? row.name
                                   : row.name + ", " +
                                         std::to_string(row.ranks) + " ranks",
                    row.report.time.step_s});
  }
  return bars(title, list, {"ms", 1e-3}, "time");
}

/// By kind, of the fullest rank of each strategy.
inline Picture memory_table(const std::vector<Row>& all) {
  std::vector<std::vector<std::string>> rows = {
      {"strategy", "parameters", "gradients", "optimizer", "activations"}};
  for (const Row& row : all) {
    rows.push_back({row.name});
    for (const MemoryKind kind :
         {MemoryKind::kParameter, MemoryKind::kGradient,
          MemoryKind::kOptimizerState, MemoryKind::kActivation}) {
      rows.back().push_back(fixed(most_of(row.report, kind) / (1 << 20), 2) +
                            " MiB");
    }
  }
  return table(rows);
}

/// Time, bytes per step and memory of a simulated step.
inline Picture costs(const std::vector<Row>& all) {
  std::vector<std::vector<std::string>> rows = {
      {"strategy", "ranks", "step", "speed-up", "idle", "sent", "memory"}};
  for (const Row& row : all) {
    const VirtualTime& time = row.report.time;
    rows.push_back({row.name, std::to_string(row.ranks),
                    fixed(1e3 * time.step_s, 0) + " ms",
                    fixed(all[0].report.time.step_s / time.step_s, 2),
                    fixed(100 * time.idle_share, 0) + " %",
                    fixed(most_bytes(row) / (1 << 30), 2) + " GiB",
                    fixed(most_memory(row.report) / (1 << 30), 2) + " GiB"});
  }
  return table(rows);
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

/// What the ledger books for a call on as many elements.
inline double booked(CommOp op) {
  CommRecord record;
  record.op = op;
  record.group_size = 4;
  record.numel = 1000;
  return wire_bytes(record);
}

inline double fsdp_over_ddp() {
  return (2 * booked(CommOp::kAllGather) + booked(CommOp::kReduceScatter)) /
         booked(CommOp::kAllReduce);
}

}  // namespace notes
