// The planner: its speed, and its plans beside published ones.
//
//   planner                 10,000 plans, each predicted; then pruned
//   planner --published     Megatron-LM, Llama 3 and MPT

#include <fmt/format.h>

#include <chrono>
#include <cstdio>

#include "bench/planner/published.h"
#include "chapters/15_engine/planner/report.h"
#include "chapters/common/run/options.h"

using namespace shardbook;

namespace {

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

void print_speed() {
  planner::Question question;
  question.model = "gpt-175b";
  question.world_size = 512;
  question.batch = 1536;
  question.seq = 2048;
  planner::read_model(question, sim::Cluster::read("selene"));
  planner::SearchOptions every;
  every.prunes = false;
  planner::Answer all, best;
  const double each_s =
      seconds_of([&] { all = planner::search(question, every); });
  const double pruned_s = seconds_of([&] { best = planner::search(question); });
  fmt::print(
      "{} on {} devices of {}, one thread\n"
      "every plan  {:6} plans, {:6} of them predicted in time as well: {:.1f} "
      "s\n"
      "with bounds {:6} plans, {:6} predicted: {:.1f} s\n",
      question.model, question.world_size, question.base.cluster.name,
      all.num_plans, all.num_predicted, each_s, best.num_plans,
      best.num_predicted, pruned_s);
}

void print_published(const std::string& folder) {
  const auto print = [](const char* title,
                        const std::vector<bench::PublishedRow>& rows) {
    std::vector<bench::Compared> compared;
    for (const bench::PublishedRow& row : rows) {
      compared.push_back(bench::compare(row));
    }
    fmt::print("{}\n{}\n", title, bench::compared_text(compared));
    std::fflush(stdout);
  };
  print("Megatron-LM, SC'21, table 1", bench::megatron_rows(folder));
  print("Llama 3, table 4", bench::llama3_rows(folder));
  print("MPT, FSDP on A100s", bench::mpt_rows(folder));
}

}  // namespace

int main(int argc, char** argv) {
  return chapter_main([&] {
    bool is_published = false;
    std::string folder = SHARDBOOK_ROOT "/bench/validate";
    CommandLine line("planner",
                     "The planner's speed, and its plans beside published "
                     "ones.");
    line.add("--published", &is_published, "compare with published plans");
    line.add("--tables", &folder, "where the published tables are");
    line.parse(argc, argv);
    if (is_published) {
      print_published(folder);
    } else {
      print_speed();
    }
    return 0;
  });
}
