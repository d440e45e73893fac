#pragma once

// Whole runs of hybrids, compared with one device.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/megatron_layers.h"
#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"
#include "tests/chapters/common/claims_support.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace shardbook::hybrid {

/// gpt-nano in f64 on short samples; a batch that many meshes divide.
inline Options nano_options(int world_size) {
  Options options;
  options.chapter = "14_hybrid_3d";
  options.world_size = world_size;
  options.dtype = DType::kF64;
  options.steps = 3;
  options.batch = 24;
  options.seq = 16;
  options.clip = 0.5;  // below the norm, so that a wrong norm changes weights
  options.seed = 3;
  options.cluster = "none";
  options.deterministic = true;
  return options;
}

inline int ranks_of(const HybridOptions& setup) {
  return setup.dp * setup.tp * setup.cp * setup.pp;
}

inline std::string name_of(const HybridOptions& setup) {
  return "dp " + std::to_string(setup.dp) + " tp " + std::to_string(setup.tp) +
         " cp " + std::to_string(setup.cp) + " " + setup.cp_kind + " " +
         setup.cp_layout + " pp " + std::to_string(setup.pp) + " zero " +
         std::to_string(setup.zero_stage) +
         (setup.sequence_parallel ? " sp " : " ") + setup.schedule + " m " +
         std::to_string(setup.micro_batches) + " " + setup.order +
         " recompute " + setup.recompute + " bucket " +
         std::to_string(setup.bucket_bytes) +
         (setup.overlap_grad_reduce ? " overlapped" : "") +
         (setup.has_experts()
              ? " experts " + std::to_string(setup.experts) + " ep " +
                    std::to_string(setup.ep) + " k " +
                    std::to_string(setup.top_k) + " noise " + setup.noise +
                    (setup.expert_tp ? " cut over tp" : "")
              : "");
}

/// Trains on the mesh and compares with one device.
inline Report train_on(const Options& options, HybridOptions setup,
                       ReferenceRun* known = nullptr) {
  check_legal(options, setup);
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, topology_of(setup));
    const auto strategy = make_strategy(options, setup, mesh);
    run.train(options, *strategy);
  };
  chapter.fold_class = fold_class(options, setup);
  chapter.reference = [&](const Options& options) {
    if (known == nullptr) return reference_run(options, setup);
    if (known->losses.empty()) *known = reference_run(options, setup);
    return *known;
  };
  return run_and_compare(options, chapter);
}

inline void expect_refusal(const Options& options, const HybridOptions& setup,
                           const std::vector<std::string>& parts) {
  expect_text(refusal(options, setup), parts);
}

/// The results of `read` on each rank of the mesh, for a strategy before its
/// first step.
template <typename StrategyType = HybridStrategy, typename Read>
auto on_mesh(const Options& options, HybridOptions setup, Read read) {
  check_legal(options, setup);
  return on_ranks(options.world_size, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, topology_of(setup));
    const auto made = make_strategy(options, setup, mesh);
    return read(world, mesh, dynamic_cast<StrategyType&>(*made));
  });
}

/// By name, bit for bit.
using Values = std::map<std::string, std::vector<double>>;

inline Values values_of(const std::vector<NamedTensor>& tensors) {
  Values values;
  for (const NamedTensor& each : tensors) {
    values[each.name] = each.tensor.to_vector<double>();
  }
  return values;
}

inline Values values_of(const HybridStrategy& strategy) {
  Values values;
  for (const UpdateBucket& bucket : strategy.update().buckets()) {
    values.merge(values_of(bucket.parameters));
  }
  return values;
}

/// After three steps, ranks that hold the same part of a parameter hold the same
/// bits: replicas, tied stages, parameters whole over tp, and experts.
inline void expect_equal_copies(const HybridOptions& setup) {
  SCOPED_TRACE(name_of(setup));
  const auto found =
      on_mesh(nano_options(ranks_of(setup)), setup,
              [](ProcessGroup&, DeviceMesh&, HybridStrategy& strategy) {
                for (std::int64_t k = 0; k < 3; ++k) strategy.step(k);
                return values_of(strategy);
              });
  const Topology grid = topology_of(setup);
  const auto part = [&](const std::string& name, int rank) {
    const int tp = grid.coordinate(rank, "tp");
    if (!moe::is_expert(name)) {
      return tensor_parallel::layout(ModelConfig(), name, tp, setup.tp);
    }
    const int ep = setup.ep > 1 ? grid.coordinate(rank, "ep") : 0;
    return moe::expert_layout(name, ep, setup.ep, tp,
                              setup.expert_tp ? setup.tp : 1);
  };
  // The first rank with a part, for all others with it
  std::map<std::string, std::vector<int>> holders;
  int compared = 0;
  for (int rank = 0; rank < static_cast<int>(found.size()); ++rank) {
    for (const auto& [name, value] : found[static_cast<std::size_t>(rank)]) {
      bool is_first = true;
      for (const int other : holders[name]) {
        if (part(name, other) != part(name, rank)) continue;
        EXPECT_EQ(value, found[static_cast<std::size_t>(other)].at(name))
            << name << " of ranks " << other << " and " << rank;
        is_first = false;
        ++compared;
      }
      if (is_first) holders[name].push_back(rank);
    }
  }
  EXPECT_GT(compared, 0);
}

/// Elements that all ranks together contribute to the norm.
inline std::int64_t counted_in_norm(const HybridOptions& setup) {
  std::int64_t counted = 0;
  for (const std::int64_t here : on_mesh(
           nano_options(ranks_of(setup)), setup,
           [](ProcessGroup&, DeviceMesh&, HybridStrategy& strategy) {
             std::int64_t numel = 0;
             for (const UpdateBucket& bucket : strategy.update().buckets()) {
               if (!bucket.counts) continue;
               if (!strategy.update().is_sharded()) numel += bucket.numel();
               for (std::size_t i = 0; i < bucket.layout.offsets.size(); ++i) {
                 for (const zero::OwnedPart& part : bucket.layout.parts(i)) {
                   if (part.owner == bucket.data->rank()) numel += part.numel;
                 }
               }
             }
             return numel;
           })) {
    counted += here;
  }
  return counted;
}

/// On shapes, one rank per stage runs, with the same time and bytes as its
/// peers. Returns the report of all ranks.
inline Report expect_folded_as_all(Options options, const HybridOptions& setup,
                                   double tolerance = 1e-9) {
  SCOPED_TRACE(name_of(setup));
  options.backend = "sim";
  options.cluster = "dgx-a100";
  const Report folded = train_on(options, setup);
  options.fold = false;
  const Report all = train_on(options, setup);
  EXPECT_NEAR(folded.time.step_s / all.time.step_s, 1, tolerance);
  EXPECT_EQ(folded.ranks.size(), all.ranks.size());
  for (std::size_t r = 0; r < all.ranks.size(); ++r) {
    EXPECT_EQ(folded.ranks.at(r).bytes.counted, all.ranks[r].bytes.counted);
  }
  return all;
}

/// One device that routes as the mesh does: one run for all meshes with the
/// same groups of tokens.
inline ReferenceRun& reference_with_experts(const Options& options,
                                            const HybridOptions& setup) {
  static std::map<std::string, ReferenceRun> known;
  std::string key = (setup.cp > 1 ? setup.cp_layout : "") + " " + setup.noise;
  for (const double each :
       {1.0 * setup.dp * setup.micro_batches, 1.0 * setup.cp,
        1.0 * setup.experts, 1.0 * setup.top_k, setup.capacity_factor,
        setup.aux_coefficient}) {
    key += " " + std::to_string(each);
  }
  if (known.count(key) == 0) {
    Options alone = options;
    alone.world_size = 1;
    known[key] = reference_run(alone, setup);
  }
  return known[key];
}

/// Losses and norms equal one device's to 1e-9, step by step.
inline void expect_losses(const Report& report, const ReferenceRun& one) {
  ASSERT_EQ(report.losses.size(), one.losses.size());
  for (std::size_t k = 0; k < one.losses.size(); ++k) {
    EXPECT_NEAR(report.losses[k], one.losses[k], 1e-9 * one.losses[k]) << k;
    EXPECT_NEAR(report.grad_norms[k], one.grad_norms[k],
                1e-9 * one.grad_norms[k])
        << k;
  }
}

/// Trains on the mesh; losses, norms and weights equal those of `one`, which is
/// run first if it is empty, and every claim holds.
inline void expect_trained_as(const Options& options,
                              const HybridOptions& setup, ReferenceRun& one) {
  SCOPED_TRACE(name_of(setup));
  const Report report = train_on(options, setup, &one);
  expect_losses(report, one);
  expect_claims(report);
}

}  // namespace shardbook::hybrid
