// One device: a block in numbers, and memory over one step.

#include <fmt/format.h>

#include "chapters/common/run/kept.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/runs.h"
#include "chapters/pictures/timeline_picture.h"
#include "core/check.h"

namespace shardbook::figures::page_00 {
namespace {

using pictures::Figure;

// A value of a block, in widths of the model.
struct Width {
  const char* name;
  double h;
};

void draw_block(Figure& figure, const std::string& title,
                const std::vector<Width>& values, double left, double top) {
  constexpr double kWidth = 48, kRow = 25;
  figure.text(left, top + 12, title);
  double y = top + 22;
  for (const Width& value : values) {
    figure.box({left, y, kWidth * value.h, 18}, "kind-activation");
    const std::string width = fmt::format("{:g}h", value.h);
    const bool has_room = value.h >= 1;
    if (has_room) {
      figure.text(left + 4, y + 13, width, Figure::Anchor::kStart, "#ffffff");
    }
    figure.text(left + kWidth * value.h + 6, y + 13,
                has_room ? value.name : width + " " + value.name);
    y += kRow;
  }
}

std::string block() {
  const std::vector<Width> gpt = {{"x", 1},
                                  {"ln_1", 1},
                                  {"queries, keys, values", 3},
                                  {"attention", 1},
                                  {"y = x + c_proj", 1},
                                  {"ln_2", 1},
                                  {"c_fc", 4},
                                  {"GELU", 4}};
  // h = 4096, 32 heads that share 8 of keys and values, MLP of 14336
  const std::vector<Width> llama = {{"x", 1},         {"norm", 1},
                                    {"queries", 1},   {"keys, values", 0.5},
                                    {"attention", 1}, {"y = x + o_proj", 1},
                                    {"norm", 1},      {"gate", 3.5},
                                    {"up", 3.5},      {"SiLU(gate) up", 3.5}};
  // The sum is what the program counts, except the statistics
  const ModelConfig config = ModelConfig::read("gpt2");
  KeptSizes sizes;
  sizes.rows = sizes.tokens = 1;
  double sum = 0;
  for (const Width& value : gpt) sum += value.h;
  const auto h = static_cast<double>(config.n_embd);
  const auto heads = static_cast<double>(config.n_head);
  SB_CHECK(kept_by_block(config, sizes) == 4 * (sum * h + 4 + heads),
           "block.svg: a block keeps other values than those in the figure");
  Figure figure(
      "A block of GPT-2 keeps 16 h numbers per token, one of Llama 17 h\n"
      "Each bar is a value that forward keeps for backward, as wide as the "
      "vector of a token.",
      640);
  const double top = figure.add_row(24 + 25 * 10 + 8);
  draw_block(figure, "GPT-2", gpt, 0, top);
  draw_block(figure, "Llama 3.1 8B", llama, 350, top);
  return figure.svg("");
}

std::string memory() {
  const Options options = on_shapes("dgx-a100", 1, "gpt2", 8, 1024);
  Options bf16 = options;
  bf16.dtype = DType::kBF16;
  single_device::SingleDeviceOptions pieces, recompute, masters;
  pieces.num_micro_batches = 4;
  recompute.recompute = true;
  masters.master_weights = true;
  return pictures::memories(
             "Micro-batches, recomputation and 16 bits lower the peak\n"
             "One step of GPT-2 with 8 samples of 1024 tokens on an A100",
             {{"plain", run_one_device(options).timelines},
              {"4 micro-batches", run_one_device(options, pieces).timelines},
              {"recomputation", run_one_device(options, recompute).timelines},
              {"bf16", run_one_device(bf16, masters).timelines}})
      .svg;
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/00_single_device/block.svg", block},
          {"chapters/00_single_device/memory.svg", memory}};
}

}  // namespace shardbook::figures::page_00
