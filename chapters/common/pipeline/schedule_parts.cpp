#include "chapters/common/pipeline/schedule_parts.h"

#include <algorithm>

#include "core/check.h"

namespace shardbook::pipeline::parts {

Schedule empty(const std::string& name, int p, int m, int chunks) {
  SB_CHECK(p >= 1, "--schedule ", name, ": ", p, " ranks; give at least 1");
  SB_CHECK(m >= 1, "--schedule ", name, ": ", m,
           " micro-batches; give at least 1");
  Schedule schedule;
  schedule.name = name;
  schedule.num_ranks = p;
  schedule.num_stages = p * chunks;
  schedule.num_micro_batches = schedule.micro_batches_per_step = m;
  schedule.routes.resize(1);
  for (int stage = 0; stage < p * chunks; ++stage) {
    schedule.routes[0].push_back({stage % p, stage / p});
  }
  schedule.route_of.assign(static_cast<std::size_t>(m), 0);
  schedule.actions.resize(static_cast<std::size_t>(p));
  return schedule;
}

Actions warm_up_pairs_drain(const Actions& forwards, const Actions& backwards,
                            int warm_up) {
  const auto total = static_cast<int>(forwards.size());
  Actions list(forwards.begin(), forwards.begin() + std::min(warm_up, total));
  for (int k = 0; k < total; ++k) {
    if (k + warm_up < total) {
      list.push_back(forwards[static_cast<std::size_t>(k + warm_up)]);
    }
    list.push_back(backwards[static_cast<std::size_t>(k)]);
  }
  return list;
}

}  // namespace shardbook::pipeline::parts
