// The counts of each rank, and how they reach rank 0.

#include <nlohmann/json.hpp>
#include <utility>

#include "chapters/common/run/report.h"

// As JSON, the form in which a report travels to rank 0
namespace shardbook::sim {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LinkBytes, link, bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TimeSummary, step_s, idle_share,
                                   exposed_comm_s, bubble_s, links)
}  // namespace shardbook::sim

namespace shardbook {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Claim, predicted, counted)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Peak, simulated, counted)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankReport, device, bytes, held, peak,
                                   peak_total, time)

RankReport rank_report(const Bill& predicted, double counted_bytes,
                       const Device& device) {
  // Without an update, a run reports what it holds at its end
  for (const MemoryKind kind :
       {MemoryKind::kParameter, MemoryKind::kOptimizerState}) {
    device.note_held(kind);
  }
  const MemoryStats counted = device.memory();
  RankReport rank;
  rank.device = device.name();
  rank.bytes = {predicted.bytes, counted_bytes};
  for (std::size_t k = 0; k < kNumHeldKinds; ++k) {
    rank.held[k] = {predicted.memory.bytes[k],
                    static_cast<double>(counted.held_by_kind[k])};
  }
  for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
    rank.peak[k].counted = static_cast<double>(counted.peak_by_kind[k]);
  }
  rank.peak_total.counted = static_cast<double>(counted.peak_total);
  return rank;
}

std::vector<RankReport> gather_reports(ProcessGroup& world,
                                       const RankReport& mine) {
  std::vector<RankReport> ranks;
  std::string before;
  for (std::string& text : world.collect(nlohmann::json(mine).dump())) {
    // Thousands of folded ranks have the report of the one that runs
    ranks.push_back(text == before
                        ? ranks.back()
                        : nlohmann::json::parse(text).get<RankReport>());
    before = std::move(text);
  }
  return ranks;
}

}  // namespace shardbook
