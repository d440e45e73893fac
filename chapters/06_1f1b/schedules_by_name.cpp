// Schedules by their names on the command line.

#include <functional>
#include <map>

#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedule_json.h"
#include "chapters/06_1f1b/schedules.h"
#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::pipeline::schedules {
namespace {

using Maker = std::function<Schedule(const ScheduleOptions&)>;

/// Makes a schedule that depends on ranks and micro-batches only.
Maker simple(Schedule (*make)(int num_ranks, int micro_batches)) {
  return [make](const ScheduleOptions& o) {
    return make(o.num_ranks, o.micro_batches);
  };
}

const std::map<std::string, Maker>& makers() {
  using O = ScheduleOptions;
  static const std::map<std::string, Maker> all = {
      {"naive", simple(naive)},
      {"gpipe", simple(gpipe::schedule)},
      {"1f1b", simple(one_f_one_b)},
      {"interleaved",
       [](const O& o) {
         return interleaved(o.num_ranks, o.micro_batches, o.chunks);
       }},
      {"zb-h1", simple(zb_h1)},
      {"zb-h2", simple(zb_h2)},
      {"zb-auto",
       [](const O& o) {
         ZeroBubbleSearch search;
         search.memory_limit =
             o.memory_limit > 0 ? o.memory_limit : 2 * o.num_ranks;
         return zb_auto(o.num_ranks, o.micro_batches, search);
       }},
      {"dualpipe", simple(dualpipe)},
      {"pipedream",
       [](const O& o) {
         const int mini_batches = o.micro_batches * o.batches;
         return o.replicas.empty() ? pipedream(o.num_ranks, mini_batches)
                                   : pipedream(o.replicas, mini_batches);
       }},
      {"pipedream-2bw", [](const O& o) {
         return pipedream_2bw(o.num_ranks, o.micro_batches, o.batches);
       }}};
  return all;
}

/// A schedule from a file. Throws Error if it does not fit the other options.
Schedule read_fitting(const std::string& file, const ScheduleOptions& o) {
  Schedule schedule = read_schedule(file);
  SB_CHECK(schedule.num_ranks == o.num_ranks, "--schedule ", file,
           ": lists of ", how_many(schedule.num_ranks, "rank"), "; there are ",
           o.num_ranks);
  SB_CHECK(schedule.num_micro_batches == o.micro_batches * o.batches,
           "--schedule ", file, ": it has ",
           how_many(schedule.num_micro_batches, "micro-batch"),
           "; give --micro-batches ", schedule.num_micro_batches);
  return schedule;
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const auto& [name, make] : makers()) result.push_back(name);
    return result;
  }();
  return names;
}

Schedule make_schedule(const std::string& name,
                       const ScheduleOptions& options) {
  if (name.ends_with(".json")) return read_fitting(name, options);
  const auto found = makers().find(name);
  std::string known;
  for (const std::string& each : schedule_names()) {
    known += (known.empty() ? "" : ", ") + each;
  }
  SB_CHECK(found != makers().end(), "--schedule ", name, ": give one of ",
           known, ", or FILE.json");
  return found->second(options);
}

}  // namespace shardbook::pipeline::schedules
