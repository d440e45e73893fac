// The order of micro-batches: pure functions.

#include "chapters/05_gpipe/gpipe.h"

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::gpipe {

pipeline::Schedule schedule(int num_stages, int num_micro_batches) {
  using namespace pipeline::parts;
  pipeline::Schedule schedule = empty("gpipe", num_stages, num_micro_batches);
  // All forwards, then all backwards from the last one to the first
  for (Actions& list : schedule.actions) {
    for (int b = 0; b < num_micro_batches; ++b) list.push_back(forward(b));
    for (int b = num_micro_batches; b-- > 0;) list.push_back(backward(b));
  }
  return schedule;
}

double idle_share(int num_stages, int num_micro_batches) {
  return static_cast<double>(num_stages - 1) /
         static_cast<double>(num_micro_batches + num_stages - 1);
}

}  // namespace shardbook::gpipe
