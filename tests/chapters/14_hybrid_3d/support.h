#pragma once

// Whole runs of hybrids, compared with one device.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "chapters/14_hybrid_3d/trainer.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"
#include "tests/chapters/common/claims_support.h"
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

inline int ranks_of(const HybridOptions& how) {
  return how.dp * how.tp * how.cp * how.pp;
}

inline std::string name_of(const HybridOptions& how) {
  return "dp " + std::to_string(how.dp) + " tp " + std::to_string(how.tp) +
         " cp " + std::to_string(how.cp) + " " + how.cp_kind + " " +
         how.cp_layout + " pp " + std::to_string(how.pp) + " zero " +
         std::to_string(how.zero_stage) +
         (how.sequence_parallel ? " sp " : " ") + how.schedule + " m " +
         std::to_string(how.micro_batches) + " " + how.order + " recompute " +
         how.recompute + " bucket " + std::to_string(how.bucket_bytes) +
         (how.has_experts()
              ? " experts " + std::to_string(how.experts) + " ep " +
                    std::to_string(how.ep) + " k " + std::to_string(how.top_k) +
                    " noise " + how.noise +
                    (how.expert_tp ? " cut over tp" : "")
              : "");
}

/// Trains on the mesh and compares with one device.
inline Report train_on(const Options& options, HybridOptions how,
                       ReferenceRun* known = nullptr) {
  check_legal(options, how);
  ChapterRun chapter;
  chapter.rank = [&](const Options& as, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, topology_of(how));
    const auto strategy = make_trainer(as, how, mesh);
    run.train(as, *strategy);
  };
  chapter.fold_class = fold_class(how);
  chapter.reference = [&](const Options& as) {
    if (known == nullptr) return reference_run(as, how);
    if (known->losses.empty()) *known = reference_run(as, how);
    return *known;
  };
  return run_and_compare(options, chapter);
}

/// On shapes, one rank of each stage takes the time and sends the bytes of its
/// peers.
inline void expect_folded_as_all(const HybridOptions& how) {
  SCOPED_TRACE(name_of(how));
  Options options = nano_options(ranks_of(how));
  options.backend = "sim";
  options.cluster = "dgx-a100";
  const Report folded = train_on(options, how);
  options.fold = false;
  const Report all = train_on(options, how);
  EXPECT_NEAR(folded.time.step_s / all.time.step_s, 1, 1e-9);
  ASSERT_EQ(folded.ranks.size(), all.ranks.size());
  for (std::size_t r = 0; r < all.ranks.size(); ++r) {
    EXPECT_EQ(folded.ranks[r].bytes.counted, all.ranks[r].bytes.counted);
  }
}

/// One device that routes as the mesh does: one run for all meshes whose groups
/// of tokens are the same.
inline const ReferenceRun& reference_with_experts(const Options& options,
                                                  const HybridOptions& how) {
  static std::map<std::string, ReferenceRun> known;
  std::string key = (how.cp > 1 ? how.cp_layout : "") + " " + how.noise;
  for (const double each :
       {1.0 * how.dp * how.micro_batches, 1.0 * how.cp, 1.0 * how.experts,
        1.0 * how.top_k, how.capacity_factor, how.aux_coefficient}) {
    key += " " + std::to_string(each);
  }
  if (known.count(key) == 0) {
    Options alone = options;
    alone.world_size = 1;
    known[key] = reference_run(alone, how);
  }
  return known[key];
}

/// Losses and norms equal those of one device to 1e-9, step by step.
inline void expect_losses(const Report& report, const ReferenceRun& one) {
  ASSERT_EQ(report.losses.size(), one.losses.size());
  for (std::size_t k = 0; k < one.losses.size(); ++k) {
    EXPECT_NEAR(report.losses[k], one.losses[k], 1e-9 * one.losses[k]) << k;
    EXPECT_NEAR(report.grad_norms[k], one.grad_norms[k],
                1e-9 * one.grad_norms[k])
        << k;
  }
}

}  // namespace shardbook::hybrid
