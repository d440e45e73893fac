// Schedules that never flush.

#include <algorithm>
#include <numeric>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/schedule.h"
#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::pipeline::schedules {

using namespace parts;

namespace {

int divided_up(int a, int b) { return (a + b - 1) / b; }

/// Mini-batch b goes to replica b mod replicas[s], so the routes repeat after
/// the least common multiple of all replicas.
void set_routes(const std::vector<int>& replicas, Schedule* schedule) {
  int num_routes = 1;
  const int most = schedule->num_micro_batches;
  for (const int count : replicas) {
    const int step = count / std::gcd(num_routes, count);
    num_routes = num_routes > most / step ? most : num_routes * step;
  }
  schedule->routes.assign(at(num_routes), {});
  for (int b = 0; b < num_routes; ++b) {
    int first_rank = 0;
    for (const int count : replicas) {
      schedule->routes[at(b)].push_back({first_rank + b % count, 0});
      first_rank += count;
    }
  }
  for (int b = 0; b < most; ++b) schedule->route_of[at(b)] = b % num_routes;
}

void check_replicas(const std::vector<int>& replicas, int mini_batches) {
  SB_CHECK(!replicas.empty(),
           "--schedule pipedream: no stages; give at least 1");
  for (const int count : replicas) {
    SB_CHECK(count >= 1, "--schedule pipedream: a stage with ",
             how_many(count, "replica"), "; give at least 1");
    SB_CHECK(mini_batches % count == 0, "--schedule pipedream: ", mini_batches,
             " mini-batches cannot be divided over ",
             how_many(count, "replica"), " of a stage; give a multiple of ",
             count);
  }
}

/// Sets the period, if each list has a part without warm-up and drain.
void set_period(int period, Schedule* schedule) {
  for (int rank = 0; rank < schedule->num_ranks; ++rank) {
    const auto& list = schedule->actions[at(rank)];
    const Schedule::Part& part = schedule->steady[at(rank)];
    const bool is_whole = at(part.end) <= list.size() &&
                          list[at(part.end - 1)].kind == ActionKind::kUpdate &&
                          list[at(part.end - 3)].kind == ActionKind::kForward;
    if (!is_whole) {
      schedule->steady.clear();
      return;
    }
  }
  schedule->period = period;
}

}  // namespace

Schedule pipedream(const std::vector<int>& replicas, int mini_batches,
                   bool vertical_sync) {
  check_replicas(replicas, mini_batches);
  const int num_ranks = std::accumulate(replicas.begin(), replicas.end(), 0);
  Schedule schedule = empty("pipedream", num_ranks, mini_batches);
  schedule.num_stages = static_cast<int>(replicas.size());
  schedule.flushes = false;
  schedule.micro_batches_per_step = 1;
  if (vertical_sync) schedule.versions = VersionRule::kFirstStage;
  set_routes(replicas, &schedule);
  // The actions of all ranks repeat after this many mini-batches
  const auto round = static_cast<int>(schedule.routes.size());
  int rank = 0;
  for (const int count : replicas) {
    const int downstream = num_ranks - rank - count;
    const int warm_up = divided_up(downstream, count);
    for (int replica = 0; replica < count; ++replica) {
      Actions forwards, backwards;
      for (int b = replica; b < mini_batches; b += count) {
        forwards.push_back(forward(b));
        backwards.push_back(backward(b));
      }
      Actions& list = schedule.actions[at(rank + replica)];
      for (const Action& each :
           warm_up_pairs_drain(forwards, backwards, warm_up)) {
        list.push_back(each);
        if (each.kind == ActionKind::kForward) continue;
        // The update averages over the replicas, with one mini-batch of each
        list.push_back(update(each.micro_batch / count * count + count - 1));
      }
      // F, B and U of a round
      schedule.steady.push_back({warm_up, warm_up + 3 * round / count});
    }
    rank += count;
  }
  set_period(round, &schedule);
  return schedule;
}

Schedule pipedream(int num_ranks, int mini_batches, bool vertical_sync) {
  SB_CHECK(num_ranks >= 1,
           "--schedule pipedream: ", how_many(num_ranks, "rank"),
           "; give at least 1");
  return pipedream(std::vector<int>(at(num_ranks), 1), mini_batches,
                   vertical_sync);
}

Schedule pipedream_2bw(int num_ranks, int micro_batches, int batches) {
  const int p = num_ranks, m = micro_batches;
  SB_CHECK(batches >= 1,
           "--schedule pipedream-2bw: ", how_many(batches, "batch"),
           "; give at least 1");
  SB_CHECK(m >= p, "--schedule pipedream-2bw: ", how_many(m, "micro-batch"),
           " on ", how_many(p, "rank"),
           "; with fewer micro-batches than ranks a third version of "
           "the weights is needed; give at least ",
           p);
  Schedule schedule = one_f_one_b(p, m * batches);
  schedule.name = "pipedream-2bw";
  schedule.flushes = false;
  schedule.versions = VersionRule::kDelayOne;
  schedule.micro_batches_per_step = m;
  for (int stage = 0; stage < p; ++stage) {
    Actions& list = schedule.actions[at(stage)];
    Actions with_updates;
    for (const Action& each : list) {
      with_updates.push_back(each);
      const bool ends_batch =
          each.kind == ActionKind::kBackward && each.micro_batch % m == m - 1;
      if (ends_batch) with_updates.push_back(update(each.micro_batch));
    }
    list = with_updates;
    // F and B of a batch, and U
    schedule.steady.push_back({p - 1 - stage, p - 1 - stage + 2 * m + 1});
  }
  set_period(m, &schedule);
  return schedule;
}

std::int64_t listed_steps(std::int64_t steps, int num_ranks, int round) {
  // Warm-up, drain, and enough steps in between for step times to settle
  const std::int64_t most = std::max(64, 4 * (num_ranks + 2)) + round;
  return steps <= most ? steps : most + (steps - most) % round;
}

}  // namespace shardbook::pipeline::schedules
