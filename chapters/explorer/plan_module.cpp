// The planner as a module of WebAssembly.
//
//   shardbook_plan('["--model", "gpt-13b", "--nodes", "8", "--batch", "512"]')
//   shardbook_answer()
//
// The answer is that of ./shardbook plan with these words: {"status": 0, "text":
// ...} or {"status": 2, "error": ...}; {"status": 3, "error": ...} where several
// ranks must run at once: --confirm, and rings in a mesh of links. Meanwhile a
// worker posts {progress: [done, all]}, the plans that are settled.

#include <emscripten.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/common/run/exit_status.h"
#include "chapters/planner/answer.h"
#include "sim/internal/fiber.h"

// In node, nobody listens
EM_JS(void, tell, (double done, double all), {
  if (typeof postMessage == "function") postMessage({progress : [ done, all ]});
});

namespace shardbook::planner {
namespace {

constexpr std::int64_t kMostMessages = 100;

void tell_progress(std::int64_t done, std::int64_t all) {
  if (done % (all / kMostMessages + 1) == 0) {
    tell(static_cast<double>(done), static_cast<double>(all));
  }
}

/// The hybrid chapter's ranks, of which several run at once.
void no_fibers(const PlanRequest&, Prediction&) {
  throw sim::NoFibers("--confirm");
}

nlohmann::json answer_to(const std::vector<std::string>& words) {
  try {
    CommandLine line(words);
    const Answer given = answer(line, no_fibers, tell_progress);
    return {{"status", given.status}, {"text", given.text}};
  } catch (const sim::NoFibers&) {
    return {
        {"status", kExitRunFailed},
        {"error",
         "several ranks would run at once: --confirm does so, and rings of cp "
         "in a cluster's mesh of links; the command line answers"}};
  } catch (const std::exception& error) {
    return {{"status", kExitBadInput}, {"error", error.what()}};
  }
}

}  // namespace
}  // namespace shardbook::planner

namespace {
std::string text;
}

extern "C" void shardbook_plan(const char* words) {
  std::vector<std::string> line = {"shardbook_plan"};
  for (const auto& word : nlohmann::json::parse(words)) line.push_back(word);
  text = shardbook::planner::answer_to(line).dump();
}

extern "C" const char* shardbook_answer() { return text.c_str(); }
