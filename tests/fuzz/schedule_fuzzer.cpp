// Whatever the text of a schedule is, reading it ends in a schedule that can
// be replayed, drawn and written, or in an Error that names the file.

#include <cmath>
#include <optional>

#include "chapters/06_1f1b/schedule_json.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "tests/fuzz/fuzz.h"

namespace {

using shardbook::kFuzzedInput;
using shardbook::promise;
using shardbook::pipeline::Replay;
using shardbook::pipeline::Schedule;
namespace pipeline = shardbook::pipeline;

void use(const Schedule& schedule) {
  const Replay replay = pipeline::replay(schedule);
  promise(std::isfinite(replay.makespan) && replay.makespan > 0);
  promise(pipeline::idle_share(replay) >= 0);
  for (const auto until : {pipeline::Until::kInput, pipeline::Until::kWeight}) {
    for (const int count : pipeline::max_live_activations(schedule, until)) {
      promise(count >= 0);
    }
  }
  for (const int count : pipeline::max_versions(schedule)) promise(count >= 0);
  promise(!pipeline::draw(schedule, replay, replay.makespan / 10).empty());
  const std::string text = pipeline::to_json(schedule);
  promise(pipeline::to_json(pipeline::schedule_from_json(text, kFuzzedInput)) ==
          text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  std::optional<Schedule> schedule;
  shardbook::read_or_refuse(
      [&] {
        schedule = pipeline::schedule_from_json(shardbook::text_of(data, size),
                                                kFuzzedInput);
      },
      /*max_size=*/2000);
  if (schedule) use(*schedule);  // which throws nothing
  return 0;
}

std::vector<std::string> shardbook::fuzz_seeds() {
  using namespace pipeline::schedules;
  std::vector<std::string> seeds = {
      "", "{}",
      R"({"name": "mine", "micro_batches": 2,
          "ranks": ["F0 F1 B0 B1", "F0 B0 F1 B1"]})",
      R"({"micro_batches": 4, "micro_batches_per_step": 2,
          "ranks": ["F0 F1&B0 B1 U F2 I2 W2 F3 B3 U3"]})"};
  for (const auto& schedule :
       {one_f_one_b(2, 3), zb_h1(2, 2), interleaved(2, 2, 2), dualpipe(2, 4),
        pipedream({2, 1}, 4, true), pipedream_2bw(2, 2, 2)}) {
    seeds.push_back(to_json(schedule));
  }
  return seeds;
}
