// Model parallelism on two devices: the chapter's own sweep, in the `sim`
// world.

#include <fmt/format.h>

#include <map>
#include <string>

#include "bench/validate/kinds.h"
#include "chapters/04_model_parallel/split_sweep.h"
#include "chapters/planner/on_shapes.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

/// Seconds of one step, each setting once.
double step_s(const std::string& model, std::int64_t batch,
              std::int64_t image_size, const std::string& variant,
              std::int64_t split_size) {
  static std::map<std::string, double> done;
  const std::string key = fmt::format("{} {} {} {} {}", model, batch,
                                      image_size, variant, split_size);
  if (const auto found = done.find(key); found != done.end()) {
    return found->second;
  }
  Options options = planner::shape_options();
  // The text names no device; a processor of a K80, fitted to its first row,
  // gives the other three
  options.cluster = "k80-pcie";
  options.world_size = 2;
  options.model = model;
  options.batch = batch;
  options.seq = 1;
  options.image_size = image_size;
  options.optimizer = "sgd";
  const model_parallel::Sweep sweep =
      model_parallel::run_sweep(options, {}, {split_size}, /*repeats=*/1);
  return done[key] = variant == "single"     ? sweep.single.virtual_s
                     : variant == "pipeline" ? sweep.pipelined[0].virtual_s
                                             : sweep.naive.virtual_s;
}

/// Height of "3x128x128".
std::int64_t image_size(const Row& row) {
  const std::string& image = row.text("image");
  const std::size_t last = image.rfind('x');
  SB_CHECK(last != std::string::npos && image.rfind("3x", 0) == 0, row.place(),
           ": image is \"", image, "\"; give 3xHEIGHTxWIDTH");
  return std::stoll(image.substr(last + 1));
}

}  // namespace

std::vector<Outcome> tutorial(const Row& row) {
  if (row.text("model") != "ResNet50") {
    throw NotExpressed("the chapter's table is of ResNet50");
  }
  const int batch = row.count("batch", 1 << 16);
  const std::string& variant = row.text("variant");
  const bool is_pipeline = variant == "pipelined";
  const std::string ours = is_pipeline                ? "pipeline"
                           : row.integer("gpus") == 1 ? "single"
                                                      : "model_parallel";
  const int split = is_pipeline ? row.count("split_size", batch) : batch;
  const double seconds =
      row.positive("num_batches") *
      step_s("resnet50", batch, image_size(row), ours, split);
  return {{variant + (is_pipeline ? fmt::format(", splits of {}", split) : ""),
           "s",
           {seconds, row.positive("time_s"), 1, "ResNet50"},
           "extrapolated"}};
}

}  // namespace shardbook::validate
