#include "chapters/06_1f1b/schedules.h"

#include <algorithm>

#include "chapters/common/pipeline/schedule.h"
#include "core/check.h"

namespace shardbook::pipeline::schedules {

using namespace parts;

namespace {

Schedule one_f_one_b_as(const std::string& name, int p, int m) {
  Schedule schedule = empty(name, p, m);
  Actions forwards, backwards;
  for (int b = 0; b < m; ++b) {
    forwards.push_back(forward(b));
    backwards.push_back(backward(b));
  }
  for (int stage = 0; stage < p; ++stage) {
    schedule.actions[static_cast<std::size_t>(stage)] =
        warm_up_pairs_drain(forwards, backwards, std::min(p - 1 - stage, m));
  }
  return schedule;
}

/// W runs `delay` micro-batches behind I; the remaining W run at the end.
Actions split_backward(int warm_up, int delay, int m) {
  Actions list;
  int next_forward = 0, next_weight = 0;
  while (next_forward < std::min(warm_up, m)) {
    list.push_back(forward(next_forward++));
  }
  for (int b = 0; b < m; ++b) {
    list.push_back(backward_input(b));
    // W frees activations before the next forward adds some
    if (b >= delay) list.push_back(backward_weight(next_weight++));
    if (next_forward < m) list.push_back(forward(next_forward++));
  }
  while (next_weight < m) list.push_back(backward_weight(next_weight++));
  return list;
}

}  // namespace

Schedule naive(int num_ranks, int micro_batches) {
  Schedule schedule = empty("naive", num_ranks, micro_batches);
  for (Actions& list : schedule.actions) {
    for (int b = 0; b < micro_batches; ++b) {
      list.push_back(forward(b));
      list.push_back(backward(b));
    }
  }
  return schedule;
}

Schedule one_f_one_b(int num_ranks, int micro_batches) {
  return one_f_one_b_as("1f1b", num_ranks, micro_batches);
}

std::vector<ClockedAction> one_f_one_b_clock(int stage, int num_ranks,
                                             int micro_batches) {
  std::vector<ClockedAction> result;
  const int s = stage, p = num_ranks;
  for (int tick = 0; tick < 2 * (micro_batches + p - 1); ++tick) {
    const bool is_forward = tick % 2 == s % 2;
    // The divisions leave no rest, because tick and stage have these parities
    const int b = is_forward ? (tick - s) / 2 : (tick + s + 1) / 2 - p;
    const bool has_begun = is_forward ? tick >= s : b >= 0;
    if (!has_begun || b >= micro_batches) continue;
    result.push_back({tick, is_forward ? forward(b) : backward(b)});
  }
  return result;
}

int one_f_one_b_buffers(int stage, int num_ranks, int micro_batches) {
  return std::max(2, std::min(num_ranks - stage, micro_batches));
}

Schedule one_f_one_b_clocked(int num_ranks, int micro_batches) {
  Schedule schedule = empty("1f1b-clocked", num_ranks, micro_batches);
  for (int stage = 0; stage < num_ranks; ++stage) {
    for (const ClockedAction& each :
         one_f_one_b_clock(stage, num_ranks, micro_batches)) {
      schedule.actions[static_cast<std::size_t>(stage)].push_back(each.action);
    }
  }
  return schedule;
}

Schedule interleaved(int num_ranks, int micro_batches, int chunks) {
  SB_CHECK(num_ranks < 1 || micro_batches % num_ranks == 0,
           "--schedule interleaved: ", micro_batches,
           " micro-batches do not divide over ", num_ranks,
           " ranks; give a multiple of ", num_ranks,
           ", or take --schedule 1f1b");
  Schedule schedule =
      interleaved_grouped(num_ranks, micro_batches, chunks, num_ranks);
  schedule.name = "interleaved";
  return schedule;
}

Schedule interleaved_grouped(int num_ranks, int micro_batches, int chunks,
                             int group) {
  const int p = num_ranks, m = micro_batches, v = chunks;
  SB_CHECK(v >= 2, "--schedule interleaved: ", v,
           " chunks per rank; give at least 2, or take --schedule 1f1b");
  Schedule schedule = empty("interleaved-grouped", p, m, v);
  SB_CHECK(m >= p, "--schedule interleaved-grouped: ", m, " micro-batches on ",
           p, " ranks; give at least ", p, ", or take --schedule 1f1b");
  SB_CHECK(group >= p && group <= m,
           "--schedule interleaved-grouped: groups of ", group, " of ", m,
           " micro-batches on ", p, " ranks; give groups of ", m);
  SB_CHECK(m % group == 0 || m % group >= p,
           "--schedule interleaved-grouped: ", m,
           " micro-batches in groups of ", group, " leave a last group of ",
           m % group, " for ", p, " ranks; give a multiple of ", group);
  // Every group passes all chunks before the next group begins
  Actions forwards, backwards;
  for (int first = 0; first < m; first += group) {
    const int last = std::min(first + group, m);
    for (int chunk = 0; chunk < v; ++chunk) {
      for (int b = first; b < last; ++b) {
        forwards.push_back(forward(b, chunk));
        backwards.push_back(backward(b, v - 1 - chunk));
      }
    }
  }
  for (int rank = 0; rank < p; ++rank) {
    const int warm_up = std::min(2 * (p - rank - 1) + (v - 1) * group, m * v);
    schedule.actions[static_cast<std::size_t>(rank)] =
        warm_up_pairs_drain(forwards, backwards, warm_up);
  }
  return schedule;
}

Schedule zb_h1(int num_ranks, int micro_batches) {
  Schedule schedule = empty("zb-h1", num_ranks, micro_batches);
  for (int stage = 0; stage < num_ranks; ++stage) {
    schedule.actions[static_cast<std::size_t>(stage)] =
        split_backward(num_ranks - stage, stage, micro_batches);
  }
  return schedule;
}

Schedule zb_h2(int num_ranks, int micro_batches) {
  Schedule schedule = empty("zb-h2", num_ranks, micro_batches);
  for (int stage = 0; stage < num_ranks; ++stage) {
    schedule.actions[static_cast<std::size_t>(stage)] =
        split_backward(2 * (num_ranks - stage) - 1, 2 * stage, micro_batches);
  }
  return schedule;
}

}  // namespace shardbook::pipeline::schedules
