// ./shardbook bench gpu: how fast one GPU is here, against its own peak, cuBLAS
// and PyTorch.
//
//   gpu_bench                     this library and cuBLAS
//   gpu_bench --pytorch SCRIPT    and PyTorch, measured by turns
//   gpu_bench --quick             small sizes, to try the program itself
//
// Each work is called until it is warm, then measured in rounds that alternate
// with its peers; the median round counts. Events in the GPU's own queue mark
// the begin and the end of a round.
//
// MFU (model FLOPs utilisation) = FLOPs of the step's products / time / peak.
// The FLOPs are counted by core on shapes, forward and backward: 2 m n k for a
// product; for attention, the pairs that the causal mask leaves, with the
// scores computed again in backward. The peak is the rate of cuBLAS in the same
// dtype, in this run.

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "bench/gpu/gpu_work.h"
#include "bench/timing.h"
#include "bench/training_step.h"
#include "chapters/common/run/command_line.h"
#include "chapters/common/run/exit_status.h"
#include "core/context.h"
#include "core/gpus.h"
#include "core/ops.h"
#include "core/text_file.h"

namespace shardbook::bench {
namespace {

// ---- The works: products, copies and training steps

Tensor random(const Shape& shape, DType dtype) {
  Tensor x = Tensor::empty(shape, {dtype});
  fill_normal(x, 0, 1, 0, 1);
  return x;
}

/// In bf16. The weights have f32 master copies, as in 00_single_device --dtype bf16
/// --master-weights; their gradients are bf16.
std::shared_ptr<TrainingStep> make_training(const Options& options) {
  auto training = make_step(options, options.optimizer);
  training->optimizer->keep_master_copies();
  return training;
}

Options training_options(const std::string& model, std::int64_t batch) {
  Options options;
  options.device = "cuda";
  options.model = model;
  options.dtype = DType::kBF16;
  options.batch = batch;
  options.optimizer_options.lr = 1e-4;
  return options;
}

/// Adds up the operations of products, from which MFU is computed.
class FlopCounter : public Observer {
 public:
  void on_op_end(const OpEvent& event) override {
    if (event.product.m > 0) flops_ += event.flops;
  }
  double flops() const { return flops_; }

 private:
  double flops_ = 0;
};

/// FLOPs of one step: one sample's, counted on shapes, times the samples.
double step_flops(Options options) {
  RankContext shapes(Device::meta(0));
  const RankContext::Scope scope(shapes);
  const std::int64_t samples = std::exchange(options.batch, 1);
  const auto training = make_training(options);
  const auto counter = std::make_shared<FlopCounter>();
  shapes.add_observer(counter);
  training->run(*training->model);
  shapes.remove_observer(counter);
  return counter->flops() * static_cast<double>(samples);
}

Work step_work(const std::string& name, const std::string& text,
               const Options& options) {
  Work work{name, text, {}, step_flops(options)};
  work.dtype = options.dtype;
  work.make = [options]() -> std::function<void()> {
    const auto training = make_training(options);
    return [training] { training->run(*training->model); };
  };
  return work;
}

Work gemm_work(const Sizes& sizes, const std::string& name, DType dtype) {
  const std::int64_t n = sizes.gemm;
  Work work{"gemm-" + name, fmt::format("product {}^3, {}", n, name)};
  work.flops = 2.0 * static_cast<double>(n * n) * static_cast<double>(n);
  work.dtype = dtype;
  work.allow_tf32 = name == "tf32";
  work.make = [n, dtype]() -> std::function<void()> {
    const Tensor a = random({n, n}, dtype), b = random({n, n}, dtype);
    return [a, b] { (void)matmul(a, b); };  // its time counts
  };
  return work;
}

Work copy_work(const Sizes& sizes, const char* name, const char* text,
               bool from_host = false, bool to_host = false) {
  Work work{name, text};
  work.bytes =
      static_cast<double>(sizes.copy_bytes) * (from_host || to_host ? 1 : 2);
  const Shape shape = {sizes.copy_bytes / 4};
  work.make = [=]() -> std::function<void()> {
    RankContext& here = RankContext::current();
    const auto zeros = [&](bool on_host) {
      return Tensor::zeros(shape,
                           {DType::kF32, on_host ? here.host() : here.device});
    };
    const Tensor a = zeros(from_host), b = zeros(to_host);
    return [a, b] { b.copy_from(a); };
  };
  return work;
}

std::vector<Work> all_works(const Sizes& sizes) {
  Options gpt = training_options(sizes.gpt, sizes.batch);
  gpt.seq = sizes.seq;
  Options resnet = training_options(sizes.resnet, sizes.images);
  resnet.image_size = sizes.image_size;
  resnet.seq = 1;
  resnet.optimizer = "sgd";
  resnet.optimizer_options.momentum = 0.9;
  return {
      gemm_work(sizes, "bf16", DType::kBF16),
      gemm_work(sizes, "f16", DType::kF16),
      gemm_work(sizes, "tf32", DType::kF32),
      gemm_work(sizes, "f32", DType::kF32),
      copy_work(sizes, "copy", "copy on the device"),
      copy_work(sizes, "copy-in", "copy from the host", /*from_host=*/true),
      copy_work(sizes, "copy-out", "copy to the host", false, /*to_host=*/true),
      step_work("gpt",
                fmt::format("{} step, bf16, AdamW, {} x {}", sizes.gpt,
                            sizes.batch, sizes.seq),
                gpt),
      step_work("resnet",
                fmt::format("{} step, bf16, SGD, {} x {}^2", sizes.resnet,
                            sizes.images, sizes.image_size),
                resnet)};
}

// ---- Their times

constexpr int kRounds = 5;
constexpr double kRoundSeconds = 0.3;

struct Settings {
  std::string pytorch;  ///< the script; empty: without PyTorch
  std::string json;     ///< a file for the results
  Sizes sizes;
};

struct Row {
  Work work;
  double ours = -1, cublas = -1, pytorch = -1;  ///< seconds; negative: none
};

/// Warms up, and returns how many calls make a round.
int warm_up(const std::function<double(int)>& seconds) {
  seconds(3);
  const double each = seconds(1);
  return std::clamp(static_cast<int>(kRoundSeconds / std::max(each, 1e-6)), 1,
                    1000);
}

Row measure(const Work& work, const Sizes& sizes, Peer* peer) {
  const ContextValue<bool> tf32(&RankContext::allow_tf32, work.allow_tf32);
  Row row;
  row.work = work;
  const std::function<void()> body = work.make();
  const auto ours = [&](int count) { return gpu_seconds(body, count); };
  const bool is_product = work.name.rfind("gemm", 0) == 0;
  const auto cublas = is_product ? cublas_gemm(work, sizes.gemm) : nullptr;
  const int count = warm_up(ours);
  if (cublas) warm_up(cublas);
  bool has_peer = peer != nullptr && peer->seconds(work.name, 3) > 0;
  std::vector<double> here, direct, there;
  for (int round = 0; round < kRounds; ++round) {
    here.push_back(ours(count));
    if (cublas) direct.push_back(cublas(count));
    if (has_peer) there.push_back(peer->seconds(work.name, count));
  }
  if (peer != nullptr) peer->drop(work.name);
  row.ours = median(here);
  if (cublas) row.cublas = median(direct);
  if (has_peer) row.pytorch = median(there);
  return row;
}

std::string time_text(double seconds) {
  if (seconds < 0) return "-";
  return seconds < 1e-3 ? fmt::format("{:.1f} us", seconds * 1e6)
                        : fmt::format("{:.2f} ms", seconds * 1e3);
}

/// "712 TFLOP/s" or "3.9 TB/s".
std::string rate_text(const Work& work, double seconds) {
  if (seconds < 0) return "-";
  if (work.flops > 0) {
    return fmt::format("{:.1f} TFLOP/s", work.flops / seconds / 1e12);
  }
  return fmt::format("{:.1f} GB/s", work.bytes / seconds / 1e9);
}

/// The rate that cuBLAS reaches in each dtype.
using Peaks = std::map<DType, double>;

double mfu(const Work& work, double seconds, const Peaks& peaks) {
  const auto found = peaks.find(work.dtype);
  if (found == peaks.end() || seconds < 0) return -1;
  return work.flops / seconds / found->second;
}

constexpr const char* kLine = "{:<38}{:>9}{:>15}{:>8}{:>10}\n";

void print_row(const Row& row) {
  const auto ratio = [&](double other) {
    return other < 0 ? "-" : fmt::format("{:.2f}", row.ours / other);
  };
  fmt::print(kLine, row.work.text, time_text(row.ours),
             rate_text(row.work, row.ours), ratio(row.cublas),
             ratio(row.pytorch));
  std::fflush(stdout);
}

nlohmann::ordered_json json_of(const Row& row, const Peaks& peaks) {
  nlohmann::ordered_json json = {{"work", row.work.name},
                                 {"text", row.work.text},
                                 {"flops", row.work.flops},
                                 {"bytes", row.work.bytes}};
  const auto add = [&](const char* key, double value) {
    json[key] =
        value < 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(value);
  };
  add("seconds", row.ours);
  add("cublas_seconds", row.cublas);
  add("pytorch_seconds", row.pytorch);
  add("mfu", row.work.flops > 0 ? mfu(row.work, row.ours, peaks) : -1);
  return json;
}

std::unique_ptr<Peer> find_peer(const Settings& settings) {
  if (settings.pytorch.empty()) return nullptr;
  const char* chosen = std::getenv("SHARDBOOK_PYTHON");
  auto peer = std::make_unique<Peer>(chosen != nullptr ? chosen : "python3",
                                     settings.pytorch, settings.sizes);
  if (peer->why_not().empty()) {
    fmt::print("pytorch   {}\n", peer->version());
    return peer;
  }
  fmt::print("pytorch   SKIPPED: {}\n", peer->why_not());
  return nullptr;
}

int run(const Settings& settings) {
  const std::string why_not = why_no_gpu();
  if (!why_not.empty()) {
    fmt::print("SKIPPED: {}\n", why_not);
    return 0;
  }
  const Gpu device = gpu(0);
  fmt::print(
      "gpu       {}, {:.0f} GiB, compute capability {}.{}\n"
      "library   {}\n",
      device.name, static_cast<double>(device.memory_bytes) / (1 << 30),
      device.major, device.minor, gpu_versions());
  const std::unique_ptr<Peer> peer = find_peer(settings);
  RankContext context(Device::cuda(0));
  const RankContext::Scope scope(context);

  fmt::print("\n");
  fmt::print(kLine, "work", "time", "rate", "/cuBLAS", "/PyTorch");
  std::vector<Row> rows;
  Peaks peaks;
  for (const Work& work : all_works(settings.sizes)) {
    rows.push_back(measure(work, settings.sizes, peer.get()));
    context.device.release_cached_memory();
    const Row& row = rows.back();
    if (row.cublas > 0 && !work.allow_tf32) {
      peaks[work.dtype] = work.flops / row.cublas;
    }
    print_row(row);
  }
  fmt::print("\n/cuBLAS, /PyTorch: our time over theirs; smaller is faster\n");
  for (const Row& row : rows) {
    const bool is_step = row.work.name == "gpt" || row.work.name == "resnet";
    const double here = mfu(row.work, row.ours, peaks);
    if (!is_step || here < 0) continue;
    fmt::print("MFU       {}: {:.1f} %", row.work.text, 100 * here);
    if (row.pytorch > 0) {
      fmt::print(" (PyTorch {:.1f} %)",
                 100 * mfu(row.work, row.pytorch, peaks));
    }
    fmt::print("\n          = {:.4g} TFLOP / time / {:.1f} TFLOP/s of cuBLAS\n",
               row.work.flops / 1e12, peaks.at(row.work.dtype) / 1e12);
  }
  if (!settings.json.empty()) {
    nlohmann::ordered_json json = {{"gpu", device.name},
                                   {"versions", gpu_versions()},
                                   {"rows", nlohmann::ordered_json::array()}};
    for (const Row& row : rows) json["rows"].push_back(json_of(row, peaks));
    write_text_file(settings.json, json.dump(2) + "\n",
                    "--json " + settings.json + ": this file");
  }
  return 0;
}

Settings read(int argc, char** argv) {
  Settings settings;
  bool is_quick = false;
  CommandLine line("gpu_bench", "One GPU against its peak, cuBLAS, PyTorch.");
  line.add("--pytorch", &settings.pytorch, "the script that measures PyTorch");
  line.add("--json", &settings.json, "write the results to this file");
  line.add("--quick", &is_quick, "small sizes, to try the program itself");
  line.parse(argc, argv);
  if (is_quick) {
    settings.sizes = {.gemm = 64,
                      .copy_bytes = 1 << 16,
                      .gpt = "gpt-nano",
                      .batch = 2,
                      .seq = 16,
                      .resnet = "resnet18",
                      .images = 2,
                      .image_size = 32};
  }
  return settings;
}

}  // namespace
}  // namespace shardbook::bench

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // a peer may have ended
  return shardbook::chapter_main([&] {
    return shardbook::bench::run(shardbook::bench::read(argc, argv));
  });
}
