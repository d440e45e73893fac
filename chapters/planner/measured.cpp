#include "chapters/planner/plan_report.h"

#include <fmt/format.h>

#include "core/how_many.h"

namespace shardbook::planner {
namespace {

// A test of bench/validate prints these rows, and fails if they differ.
constexpr Measured kAll[] = {
    {"a100", "ZeRO-3", 155, 7.3, 35},
    {"a100", "pipelines", 425, 7.2, 35},
    {"a100", "replicas", 123, 5.2, 12},
    {"a100", "tensor parallelism", 251, 8.4, 26},
    {"h100", "ZeRO-3", 33, 7.7, 29},
    {"h100", "context parallelism", 33, 6.4, 20},
    {"h100", "experts", 16, 5.3, 16},
    {"h100", "pipelines", 11, 1.7, 9},
    {"h100", "replicas", 3, 4.2, 9},
    {"h100", "tensor parallelism", 11, 5.0, 9},
    {"h200", "ZeRO-3", 2, 1.7, 3},
    {"v100", "replicas", 1, 3.8, 4},
    {"v100", "tensor parallelism", 3, 4.4, 6},
};

}  // namespace

std::string kind_of(const HybridJob& job) {
  return job.layout.ep > 1    ? "experts"
         : job.layout.cp > 1  ? "context parallelism"
         : job.pp > 1         ? "pipelines"
         : job.zero_stage > 2 ? "ZeRO-3"
         : job.layout.tp > 1  ? "tensor parallelism"
                              : "replicas";
}

std::string family_of(const sim::Cluster& cluster) {
  return cluster.device.name.substr(0, cluster.device.name.find('-'));
}

const Measured* measured(const HybridJob& job) {
  const std::string device = family_of(job.cluster), kind = kind_of(job);
  for (const Measured& each : kAll) {
    if (each.device == device && each.kind == kind) return &each;
  }
  return nullptr;
}

std::string measured_text(const HybridJob& job) {
  const std::string of = fmt::format("Steps with {} on {}: ", kind_of(job),
                                     family_of(job.cluster));
  const Measured* found = measured(job);
  if (found == nullptr) return of + "none was compared with a measured one.";
  return of + fmt::format(
                  "predictions were {:.1f} % off on average, {:.0f} % at most, "
                  "of {} (bench/validation.md).",
                  found->mean, found->most,
                  how_many(found->steps, "measured step"));
}

}  // namespace shardbook::planner
