// Whatever the text of a timeline is, reading it ends in a timeline that can be
// drawn or in an Error that names its source and can be read.

#include "sim/timeline_json.h"
#include "tests/fuzz/fuzz.h"

namespace {

using shardbook::kFuzzedInput;
using shardbook::promise;

void check_view(const shardbook::sim::StepView& view) {
  promise(view.step_s >= 0);
  for (const auto& group : view.groups) {
    promise(!group.ranks.empty());
    promise(group.ranks.back() < view.world_size);
    for (const auto& event : group.timeline.events) {
      promise(0 <= event.begin_s && event.begin_s <= event.end_s);
      promise(event.bytes >= 0 && event.flops >= 0);
    }
    double time_s = 0;
    for (const auto& sample : group.timeline.memory) {
      promise(time_s <= sample.time_s);
      time_s = sample.time_s;
      for (const auto bytes : sample.bytes) promise(bytes >= 0);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  shardbook::read_or_refuse(
      [&] {
        check_view(shardbook::sim::read_timeline_json(
            shardbook::text_of(data, size), kFuzzedInput));
      },
      /*max_size=*/400);
  return 0;
}

namespace shardbook {

std::vector<std::string> fuzz_seeds() {
  std::vector<sim::RankTimeline> ranks(3);
  for (int r = 0; r < 3; ++r) {
    ranks[r].rank = r;
    ranks[r].steps = {0, 1};
    sim::TimelineEvent event{"send",       "to \"1\"", "comm",
                             "comm world", 0.25,       0.5};
    event.bytes = 1e6 + 0.5;
    event.flops = r == 2 ? 7 : 0;
    event.peer = 1;
    event.message = 4;
    ranks[r].events = {event};
    sim::MemorySample sample;
    sample.bytes = {1, 2, 3, 4, 5, 6, 7};
    ranks[r].memory = {sample};
  }
  return {sim::timeline_json(ranks), sim::timeline_json({}),
          R"({"world_size": 2, "step_s": 1e308, "ops": [["a", "b", "c"]],
              "kinds": ["input"], "groups": [{"ranks": [[0, 1]],
              "queues": [{"name": "q", "events": [[0, 0, 4e18]]}],
              "memory": [[0, 9223372036854775807]]}]})"};
}

}  // namespace shardbook
