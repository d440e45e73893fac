// The examples in the comments of comm's and sim's headers, as code that
// compiles. docs_test.cpp looks for each line below its header's name.

#include <functional>
#include <optional>
#include <vector>

#include "comm/device_mesh.h"
#include "comm/launch.h"
#include "comm/process_group.h"
#include "comm/processes.h"
#include "comm/signals.h"
#include "comm/topology.h"
#include "core/ops.h"
#include "sim/cluster.h"
#include "sim/cost_model.h"
#include "sim/flow_network.h"
#include "sim/timeline_step.h"

namespace shardbook::examples {

// --- comm/device_mesh.h
void device_mesh(ProcessGroup& world, Tensor& x) {
  DeviceMesh mesh(world, Topology::megatron(2, 1, 2, 2));
  mesh.group("tp").all_reduce(x).wait();
  mesh.group("dp-cp").size();
  mesh.coordinate("pp");
}

// --- comm/process_group.h
void process_group() {
  run_ranks(4, [](ProcessGroup& world) {
    Tensor x = Tensor::full({3}, world.rank());
    world.all_reduce(x).wait();
  });
}

// --- comm/processes.h
namespace processes {
LaunchOptions options;
std::function<void(ProcessGroup&)> body;
void print_results();
int main() {
  if (std::optional<int> status = launch_processes(4, options)) {
    return *status;
  }
  run_ranks(4, body, options);
  if (is_first_process()) print_results();
  return 0;
}
}  // namespace processes

// --- comm/signals.h
namespace signals {
void prepare();
bool train_a_step();
int main() {
  watch_signals();
  prepare();
  begin_checking_signals();
  while (received_signal() == 0 && train_a_step()) {
  }
  return 0;
}
}  // namespace signals

// --- comm/topology.h
void topology() {
  Topology grid({"pp", "dp", "tp"}, {4, 2, 2});
  grid.get_rank({{"tp", 1}, {"dp", 0}, {"pp", 2}});
  grid.groups({"pp"})[1];
}

using namespace sim;

// --- sim/cluster.h
void cluster() {
  { Cluster cluster = Cluster::read("dgx-a100"); }
  { Cluster cluster = Cluster::read("my-cluster.json"); }
}

// --- sim/cost_model.h
void cost_model() {
  CostModel costs(Cluster::read("dgx-a100"));
  costs.collective(CommOp::kAllReduce, 1e9, {0, 1, 2, 3}).seconds;
}

// --- sim/flow_network.h
void flow_network() {
  FlowNetwork network;
  Flow flow;  // 25 GB through one NIC, beginning at once
  flow.seconds = flow.transfer_s = 1;
  flow.max_rate = 25e9;
  flow.uses = use_links({{network.add_link(25e9), 1}});
  const FlowRef first = network.add(flow), second = network.add(flow);
  network.advance();  // to the next end of a flow
  first->end_s;       // 2 s: each has had half of the NIC
}

// --- sim/timeline_step.h
void timeline_step(const std::vector<RankTimeline>& timelines) {
  StepView view = last_step(timelines);
  view.groups.size();
  rank_list(view.groups[0].ranks);
}

}  // namespace shardbook::examples
