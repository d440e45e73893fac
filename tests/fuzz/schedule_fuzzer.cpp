// Whatever the text of a schedule is, reading it ends in a schedule that can
// be replayed, drawn and written, or in an Error that names the file.

#include <cmath>

#include "chapters/06_1f1b/schedule_json.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "core/check.h"
#include "tests/fuzz/fuzz.h"

namespace {

using shardbook::check_message;
using shardbook::promise;
using shardbook::pipeline::Replay;
using shardbook::pipeline::Schedule;
namespace pipeline = shardbook::pipeline;

constexpr const char* kLabel = "fuzzed-input";

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
  promise(pipeline::to_json(pipeline::schedule_from_json(text, kLabel)) ==
          text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  Schedule schedule;
  try {
    schedule = pipeline::schedule_from_json(
        std::string(reinterpret_cast<const char*>(data), size), kLabel);
  } catch (const shardbook::Error& error) {
    check_message(error.what(), kLabel, /*max_size=*/2000);
    return 0;
  }
  use(schedule);
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
