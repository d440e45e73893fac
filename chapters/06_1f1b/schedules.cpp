#include "chapters/06_1f1b/schedules.h"

#include <algorithm>

#include "chapters/common/pipeline/schedule.h"
#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::pipeline::schedules {

using namespace parts;

namespace {

/// W runs `delay` micro-batches after I; the remaining W run at the end.
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
  const int p = num_ranks, m = micro_batches;
  Schedule schedule = empty("1f1b", p, m);
  Actions forwards, backwards;
  for (int b = 0; b < m; ++b) {
    forwards.push_back(forward(b));
    backwards.push_back(backward(b));
  }
  for (int stage = 0; stage < p; ++stage) {
    schedule.actions[at(stage)] =
        warm_up_pairs_drain(forwards, backwards, std::min(p - 1 - stage, m));
  }
  return schedule;
}

Schedule interleaved(int num_ranks, int micro_batches, int chunks) {
  const int p = num_ranks, m = micro_batches, v = chunks;
  SB_CHECK(p < 1 || m % p == 0,
           "--schedule interleaved: ", how_many(m, "micro-batch"),
           " cannot be divided over ", how_many(p, "rank"),
           "; give a multiple of ", p, ", or take --schedule 1f1b");
  SB_CHECK(v >= 2, "--schedule interleaved: ", how_many(v, "chunk"),
           " per rank; give at least 2, or take --schedule 1f1b");
  Schedule schedule = empty("interleaved", p, m, v);
  // Every p micro-batches pass all chunks before the next p begin
  Actions forwards, backwards;
  for (int first = 0; first < m; first += p) {
    for (int chunk = 0; chunk < v; ++chunk) {
      for (int b = first; b < first + p; ++b) {
        forwards.push_back(forward(b, chunk));
        backwards.push_back(backward(b, v - 1 - chunk));
      }
    }
  }
  for (int rank = 0; rank < p; ++rank) {
    const int warm_up = std::min(2 * (p - rank - 1) + (v - 1) * p, m * v);
    schedule.actions[at(rank)] =
        warm_up_pairs_drain(forwards, backwards, warm_up);
  }
  return schedule;
}

Schedule zb_h1(int num_ranks, int micro_batches) {
  Schedule schedule = empty("zb-h1", num_ranks, micro_batches);
  for (int stage = 0; stage < num_ranks; ++stage) {
    schedule.actions[at(stage)] =
        split_backward(num_ranks - stage, stage, micro_batches);
  }
  return schedule;
}

Schedule zb_h2(int num_ranks, int micro_batches) {
  Schedule schedule = empty("zb-h2", num_ranks, micro_batches);
  for (int stage = 0; stage < num_ranks; ++stage) {
    schedule.actions[at(stage)] =
        split_backward(2 * (num_ranks - stage) - 1, 2 * stage, micro_batches);
  }
  return schedule;
}

}  // namespace shardbook::pipeline::schedules
