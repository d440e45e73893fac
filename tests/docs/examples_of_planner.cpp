// The examples in the comments of the planner's headers, as code that compiles.

#include "chapters/planner/plan.h"
#include "chapters/planner/search.h"
#include "sim/cluster.h"

namespace shardbook::planner::examples {

// --- chapters/planner/plan.h
void ask() {
  PlanRequest request;
  request.model = "gpt-13b";
  request.world_size = 64;
  request.batch = 1024;
  request.base.sizes.seq = 2048;
  read_model(request, sim::Cluster::read("dgx-a100"));
  PlanResult result = search(request);
  result.best[0].plan.layout_text();
}

}  // namespace shardbook::planner::examples
