// Published results against the book's predictions.
//
//   ./shardbook bench validate
//   ./shardbook bench validate --table my.csv --format json
//
// Exit status: 0, all tables were read and predicted; 2, one could not be.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "bench/validate/jobs.h"
#include "bench/validate/kinds.h"
#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/options.h"
#include "core/check.h"

using namespace shardbook;

namespace {

std::vector<std::string> own_tables() {
  const std::string folder = SHARDBOOK_ROOT "/bench/validate";
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".csv") files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

int main(int argc, char** argv) {
  return chapter_main([&] {
    std::string file, jobs, cluster, format = "text";
    CommandLine line("validate", "Published results against predictions.");
    line.add("--table", &file, "FILE.csv with the columns of a known kind");
    line.add("--jobs", &jobs,
             "FILE.csv with training steps of your own: bench/own_rows.md");
    line.add("--cluster", &cluster,
             "PRESET=FILE.json: predict with this file in place of a preset");
    line.add("--format", &format, "text, or one JSON object per table",
             {"text", "json"});
    line.parse(argc, argv);

    if (!cluster.empty()) {
      const std::size_t equals = cluster.find('=');
      SB_CHECK(equals != std::string::npos, "--cluster ", cluster,
               ": give PRESET=FILE.json");
      validate::replace_cluster(cluster.substr(0, equals),
                                cluster.substr(equals + 1));
    }
    SB_CHECK(file.empty() || jobs.empty(), "--table, --jobs: give one of them");
    if (!jobs.empty()) {
      file = jobs;
      validate::check_jobs(validate::open_table(file));
    }
    const bool is_text = format == "text";
    for (const std::string& each :
         file.empty() ? own_tables() : std::vector<std::string>{file}) {
      const validate::Validation result =
          validate::validate(validate::open_table(each));
      fmt::print(
          "{}{}",
          is_text ? validate::as_text(result) : validate::as_json(result),
          is_text ? "\n" : "");
      std::fflush(stdout);
    }
    return 0;
  });
}
