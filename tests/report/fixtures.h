#pragma once

// Program runs as chapters print them, with timelines as a cluster of 4
// devices would make them: what report.html is tested with.

#include <string>
#include <vector>

namespace shardbook::report {

/// JSON objects of six runs: one device without virtual time; DDP on 4 ranks,
/// of which one is slow; ZeRO-3 on 4 ranks that gather and release each layer;
/// a pipeline of 4 stages, twice; and a run with failed claims and hostile
/// names.
std::vector<std::string> fixture_runs();

}  // namespace shardbook::report
