#include "chapters/common/run/run_identity.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "chapters/common/models/data.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/training.h"

namespace shardbook {

std::vector<ComparedOption> identity_of(const Options& options) {
  const ModelConfig config = model_config(options);
  std::vector<ComparedOption> all;
  const auto model = nlohmann::ordered_json::parse(config.to_json());
  for (const auto& [key, value] : model.items()) {
    if (key != "architectures")
      all.push_back({"model's " + key, value.dump(), ""});
  }
  all.push_back(
      {"data's fingerprint",
       fmt::format("{:016x}", Dataset::open(options, config).fingerprint()),
       ""});
  // The line keeps the defaults of the options that it was given first
  Options shared;
  CommandLine line("shared", "");
  add_shared_options(line, shared);
  shared = options;
  shared.steps += shared.first_step;
  for (const auto& each : {line.compared(), options.compared}) {
    all.insert(all.end(), each.begin(), each.end());
  }
  return all;
}

void put_identity(const std::vector<ComparedOption>& identity,
                  Manifest& manifest) {
  for (const ComparedOption& each : identity) {
    manifest.run.emplace(each.name, each.value);
    manifest.otherwise.emplace(each.name, each.otherwise);
  }
}

std::string differences(const Manifest& there,
                        const std::vector<ComparedOption>& here) {
  Manifest mine;
  put_identity(here, mine);
  std::set<std::string> names;
  for (const auto& [name, value] : there.run) names.insert(name);
  for (const auto& [name, value] : mine.run) names.insert(name);
  // The value of a program with the option, or as which one without it trains
  const auto value_in = [](const Manifest& run, const Manifest& other,
                           const std::string& name) {
    for (const auto* values : {&run.run, &other.otherwise}) {
      const auto found = values->find(name);
      if (found != values->end() && !found->second.empty())
        return found->second;
      if (found != values->end()) break;
    }
    return std::string("not set");
  };
  std::string text;
  for (const std::string& name : names) {
    const std::string a = value_in(there, mine, name);
    const std::string b = value_in(mine, there, name);
    const bool is_new = there.run.count(name) != mine.run.count(name);
    if (a == b || (is_new && name.rfind("model's ", 0) == 0)) continue;
    text += fmt::format("{}{} {} there, {} here", text.empty() ? "" : "; ",
                        name, a, b);
  }
  return text;
}

}  // namespace shardbook
