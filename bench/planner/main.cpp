// The planner: its speed, and its plans beside published ones.
//
//   planner                      10,000 plans, each predicted; then pruned
//   planner --published          Megatron-LM, Llama 3 and MPT
//   planner --published llama3   one of them: megatron, llama3, mpt

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "bench/planner/published.h"
#include "bench/timing.h"
#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/options.h"
#include "chapters/planner/plan_report.h"

using namespace shardbook;
using bench::seconds_of;

namespace {

void print_speed() {
  planner::PlanRequest request;
  request.model = "gpt-175b";
  request.world_size = 512;
  request.batch = 1536;
  request.base.sizes.seq = 2048;
  planner::read_model(request, sim::Cluster::read("selene"));
  planner::SearchOptions every;
  every.prunes = false;
  planner::PlanResult all, best;
  const double each_s =
      seconds_of([&] { all = planner::search(request, every); });
  const double pruned_s = seconds_of([&] { best = planner::search(request); });
  fmt::print(
      "{} on {} devices of {}, one thread\n"
      "every plan  {:6} plans, {:6} of them predicted in time as well: {:.1f} "
      "s\n"
      "with bounds {:6} plans, {:6} predicted: {:.1f} s\n",
      request.model, request.world_size, request.base.cluster.name,
      all.num_plans, all.num_predicted, each_s, best.num_plans,
      best.num_predicted, pruned_s);
}

void print_plans(const std::string& model, const bench::Compared& compared) {
  fmt::print("{}, {} per device\n", model,
             planner::bytes_text(compared.memory_bytes));
  const auto line = [&](const char* whose, const planner::Prediction& of) {
    const double slower = compared.published.step.seconds / of.step.seconds - 1;
    fmt::print("  {:<10}{:<38}{:>9}{:>10}{:>+8.1f} %\n{:12}{}\n", whose,
               of.plan.layout_text(), planner::bytes_text(of.memory.total()),
               planner::time_text(of.step.seconds), 100 * slower, "",
               of.plan.work_text());
  };
  line("published", compared.published);
  line("ours", compared.within);
  if (compared.open.step.seconds > 0) line("free", compared.open);
  std::fflush(stdout);
}

void print_published(const std::string& which, bool asks_open) {
  const auto print = [&](const char* name, const char* title,
                         std::vector<bench::PublishedRow> (*rows)()) {
    if (which != "all" && which != name) return;
    fmt::print("{}\n", title);
    double least = 1e30, most = 0;
    const double seconds = seconds_of([&] {
      for (const bench::PublishedRow& row : rows()) {
        const bench::Compared compared = bench::compare(row, asks_open);
        least = std::min(least, compared.slower());
        most = std::max(most, compared.slower());
        print_plans(row.model, compared);
      }
    });
    fmt::print(
        "published plans are {:.1f} % to {:.1f} % slower than ours; {:.0f} "
        "s\n\n",
        100 * least, 100 * most, seconds);
  };
  print("megatron", "Megatron-LM, SC'21, table 1", bench::megatron_rows);
  print("llama3", "Llama 3, table 4", bench::llama3_rows);
  print("mpt", "MPT, FSDP on A100s", bench::mpt_rows);
}

}  // namespace

int main(int argc, char** argv) {
  return chapter_main([&] {
    std::string published;
    bool asks_open = true;
    CommandLine line(
        "planner", "The planner's speed, and its plans beside published ones.");
    line.add_mode("--published", &published, "compare with published plans",
                  {"all", "megatron", "llama3", "mpt"});
    line.add("--free", &asks_open,
             "ask again with all of this book's choices, which is slower");
    line.parse(argc, argv);
    if (!published.empty()) {
      print_published(published, asks_open);
    } else {
      print_speed();
    }
    return 0;
  });
}
