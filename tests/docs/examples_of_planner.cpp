// The examples in the comments of the planner's headers, as code that compiles.

#include "chapters/planner/plan.h"
#include "chapters/planner/search.h"
#include "sim/cluster.h"

namespace shardbook::planner::examples {

// --- chapters/planner/plan.h
void ask() {
  Question question;
  question.model = "gpt-13b";
  question.world_size = 64;
  question.batch = 1024;
  question.seq = 2048;
  read_model(question, sim::Cluster::read("dgx-a100"));
  Answer answer = search(question);
  answer.best[0].plan.layout_text();
}

}  // namespace shardbook::planner::examples
