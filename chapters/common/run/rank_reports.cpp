// What each rank counted, and how rank 0 learns of it.

#include <nlohmann/json.hpp>

#include "chapters/common/run/report.h"

namespace shardbook {

using nlohmann::ordered_json;

RankReport rank_report(const Bill& predicted, double counted_bytes,
                       const Device& device) {
  // A run without an update holds what it has at its end
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
  const auto pair = [](const Claim& claim) {
    return ordered_json{claim.predicted, claim.counted};
  };
  ordered_json json = {{"device", mine.device},
                       {"bytes", pair(mine.bytes)},
                       {"held", ordered_json::array()},
                       {"peak", ordered_json::array()},
                       {"peak_total", mine.peak_total.counted},
                       {"step_s", mine.time.step_s},
                       {"idle_share", mine.time.idle_share},
                       {"exposed_comm_s", mine.time.exposed_comm_s},
                       {"bubble_s", mine.time.bubble_s},
                       {"links", ordered_json::array()}};
  for (const Claim& claim : mine.held) json["held"].push_back(pair(claim));
  for (const Peak& peak : mine.peak) json["peak"].push_back(peak.counted);
  for (const sim::LinkBytes& link : mine.time.links) {
    json["links"].push_back({link.link, link.bytes});
  }
  std::vector<RankReport> ranks;
  for (const std::string& text : world.collect(json.dump())) {
    const ordered_json other = ordered_json::parse(text);
    RankReport rank;
    const auto claim = [](const ordered_json& pair) {
      return Claim{pair[0], pair[1]};
    };
    other["device"].get_to(rank.device);
    rank.bytes = claim(other["bytes"]);
    for (std::size_t k = 0; k < kNumHeldKinds; ++k) {
      rank.held[k] = claim(other["held"][k]);
    }
    for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
      other["peak"][k].get_to(rank.peak[k].counted);
    }
    other["peak_total"].get_to(rank.peak_total.counted);
    other["step_s"].get_to(rank.time.step_s);
    other["idle_share"].get_to(rank.time.idle_share);
    other["exposed_comm_s"].get_to(rank.time.exposed_comm_s);
    other["bubble_s"].get_to(rank.time.bubble_s);
    for (const auto& link : other["links"]) {
      rank.time.links.push_back({link[0], link[1]});
    }
    ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace shardbook
