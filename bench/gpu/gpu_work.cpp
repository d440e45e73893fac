#include "bench/gpu/gpu_work.h"

#include <utility>

#include "bench/training_step.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook::bench {
namespace {

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

void add_gemm_works(const Sizes& sizes, std::vector<Work>& works) {
  const std::int64_t n = sizes.gemm;
  const auto add = [&](const std::string& name, DType dtype, bool tf32) {
    Work work{"gemm-" + name, "product " + std::to_string(n) + "^3, " + name};
    work.flops = 2.0 * static_cast<double>(n * n) * static_cast<double>(n);
    work.dtype = dtype;
    work.allow_tf32 = tf32;
    work.make = [n, dtype]() -> std::function<void()> {
      const Tensor a = random({n, n}, dtype), b = random({n, n}, dtype);
      return [a, b] { (void)matmul(a, b); };  // its time counts
    };
    works.push_back(std::move(work));
  };
  add("bf16", DType::kBF16, false);
  add("f16", DType::kF16, false);
  add("tf32", DType::kF32, true);
  add("f32", DType::kF32, false);
}

void add_copy_works(const Sizes& sizes, std::vector<Work>& works) {
  const auto add = [&](const char* name, const char* text, bool from_host,
                       bool to_host) {
    Work work{name, text};
    work.bytes =
        static_cast<double>(sizes.copy_bytes) * (from_host || to_host ? 1 : 2);
    const Shape shape = {sizes.copy_bytes / 4};
    work.make = [=]() -> std::function<void()> {
      RankContext& here = RankContext::current();
      const auto zeros = [&](bool on_host) {
        return Tensor::zeros(
            shape, {DType::kF32, on_host ? here.host() : here.device});
      };
      const Tensor a = zeros(from_host), b = zeros(to_host);
      return [a, b] { b.copy_from(a); };
    };
    works.push_back(std::move(work));
  };
  add("copy", "copy on the device", false, false);
  add("copy-in", "copy from the host", true, false);
  add("copy-out", "copy to the host", false, true);
}

void add_step_works(const Sizes& sizes, std::vector<Work>& works) {
  Options gpt = training_options(sizes.gpt, sizes.batch);
  gpt.seq = sizes.seq;
  Options resnet = training_options(sizes.resnet, sizes.images);
  resnet.image_size = sizes.image_size;
  resnet.seq = 1;
  resnet.optimizer = "sgd";
  resnet.optimizer_options.momentum = 0.9;
  const auto by = [](std::int64_t a, std::int64_t b) {
    return std::to_string(a) + " x " + std::to_string(b);
  };
  works.push_back(step_work(
      "gpt", sizes.gpt + " step, bf16, AdamW, " + by(sizes.batch, sizes.seq),
      gpt));
  works.push_back(step_work("resnet",
                            sizes.resnet + " step, bf16, SGD, " +
                                by(sizes.images, sizes.image_size) + "^2",
                            resnet));
}

}  // namespace

std::vector<Work> all_works(const Sizes& sizes) {
  std::vector<Work> works;
  add_gemm_works(sizes, works);
  add_copy_works(sizes, works);
  add_step_works(sizes, works);
  return works;
}

}  // namespace shardbook::bench
