// Which axes and stages of ZeRO go together (degrees.h).

#include <algorithm>
#include <sstream>

#include "chapters/14_hybrid_3d/degrees.h"

namespace shardbook::hybrid {

namespace {

/// The options of one column of the table.
struct Column {
  int ep;
  std::int64_t experts;
  const char* model;
};
constexpr Column kColumns[] = {
    {1, 1, "gpt-nano"}, {2, 8, "gpt-nano"}, {1, 1, "resnet18"}};

}  // namespace

std::string combinations_text() {
  std::ostringstream text;
  std::vector<std::string> reasons;
  text << std::string(18, ' ')
       << "without experts   experts over ep   image models\n"
       << "axes above 1 ZeRO   0   1   2   3     0   1   2   3     0   1   2   "
          "3\n";
  for (int set = 0; set < 16; ++set) {
    HybridOptions setup;
    std::string axes;
    const auto degree = [&](int bit, const char* name) {
      if ((set >> bit & 1) == 0) return 1;
      axes += (axes.empty() ? "" : " x ") + std::string(name);
      return 2;
    };
    const int dp = degree(0, "dp");
    setup.tp = degree(1, "tp");
    setup.cp = degree(2, "cp");
    setup.pp = degree(3, "pp");
    if (axes.empty()) axes = "none";
    axes.resize(17, ' ');
    text << axes;
    for (const Column& column : kColumns) {
      setup.ep = column.ep;
      setup.experts = column.experts;
      setup.dp = dp * setup.ep;
      if (&column != kColumns) text << "  ";
      for (setup.zero_stage = 0; setup.zero_stage < 4; ++setup.zero_stage) {
        Options options;
        options.model = column.model;
        options.world_size = setup.dp * setup.tp * setup.cp * setup.pp;
        options.batch = 4 * setup.dp * setup.micro_batches;
        const std::string reason = refusal(options, setup);
        std::string cell = "yes";
        if (!reason.empty()) {
          const auto found = std::find(reasons.begin(), reasons.end(), reason);
          cell = "[" + std::to_string(found - reasons.begin() + 1) + "]";
          if (found == reasons.end()) reasons.push_back(reason);
        }
        text << std::string(4 - cell.size(), ' ') << cell;
      }
    }
    text << "\n";
  }
  for (std::size_t i = 0; i < reasons.size(); ++i) {
    text << "[" << i + 1 << "] " << reasons[i] << "\n";
  }
  return text.str();
}

}  // namespace shardbook::hybrid
