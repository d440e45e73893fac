// Shardbook's side of `./shardbook bench pytorch`: one work, timed on request.
//
//   pytorch_peer step --model gpt-micro --batch 8 --seq 128
//   pytorch_peer allreduce --bytes 67108864 --backend gloo --world-size 4
//
// The works and the protocol on stdin and stdout are stated in pytorch.py.

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <iostream>
#include <memory>
#include <string>

#include "bench/timing.h"
#include "bench/training_step.h"
#include "chapters/02_ddp/ddp.h"
#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/options.h"
#include "comm/launch.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook::bench {
namespace {

/// The command line, as pytorch.py states it. The batch is one rank's.
struct PeerOptions : Options {
  std::string work;
  std::int64_t size = 1024;
  std::int64_t bytes = std::int64_t{64} << 20;
  int threads = 1;  ///< of one rank
};

PeerOptions parse(int argc, char** argv) {
  SB_CHECK(argc > 1, "give a work, then its options; see pytorch.py");
  PeerOptions options;
  options.work = argv[1];
  options.model = "gpt-micro";
  options.world_size = 1;
  options.batch = 8;
  options.seq = 128;
  CommandLine line("pytorch_peer", "Our side of ./shardbook bench pytorch.");
  line.add("--model", &options.model, "of the training steps");
  line.add("--backend", &options.backend, "of the ranks");
  line.add("--dtype", &options.dtype, "of the training steps", {"f32", "bf16"});
  line.add("--size", &options.size, "of a matrix or an image", 1);
  line.add("--batch", &options.batch, "samples of one rank", 1);
  line.add("--seq", &options.seq, "tokens per sample", 1);
  line.add("--bytes", &options.bytes, "of an all-reduce", 1);
  line.add("--world-size", &options.world_size, "ranks", 1);
  line.add("--threads", &options.threads, "of one rank", 1);
  line.parse(argc - 1, argv + 1);
  options.image_size = options.size;
  options.optimizer_options.lr = 1e-3;
  return options;
}

// --- The works ---------------------------------------------------------------

/// One iteration of a work, ready to run on this rank.
struct TimedWork {
  std::string variant;  ///< which implementation ran, for the record
  std::function<void()> body;
};

TimedWork matmul_work(const PeerOptions& options) {
  const Shape shape = {options.size, options.size};
  Tensor a = Tensor::empty(shape), b = Tensor::empty(shape);
  fill_normal(a, 0, 1, 0, 1);
  fill_normal(b, 0, 2, 0, 1);
  // The allocator reuses the block of the previous product.
  return {"matmul", [a, b] { (void)matmul(a, b); }};
}

/// Heads as in gpt-micro.
TimedWork attention_work(const PeerOptions& options) {
  constexpr std::int64_t kWidth = 256;
  AttentionOptions setup;
  setup.heads = 8;
  Tensor qkv = Tensor::empty({options.batch, options.seq, 3 * kWidth});
  Tensor gradient = Tensor::empty({options.batch, options.seq, kWidth});
  fill_normal(qkv, 0, 1, 0, 1);
  fill_normal(gradient, 0, 2, 0, 1);
  qkv.set_requires_grad();
  return {"packed", [=]() mutable {
            qkv.clear_grad();
            autograd::backward({attention(qkv, setup)}, {gradient});
          }};
}

/// One device's, of tokens or of images, or under DistributedDataParallel.
TimedWork step_work(const PeerOptions& options, ProcessGroup& world) {
  const bool is_images = options.work == "images";
  auto step = make_step(options, is_images ? "sgd" : "adamw", world.rank());
  if (options.work != "ddp") {
    return {is_images ? "channels last" : "one device",
            [step] { step->run(*step->model); }};
  }
  ddp::DdpOptions ddp_options;
  ddp_options.gradient_as_bucket_view = true;
  auto wrapped = std::make_shared<ddp::DistributedDataParallel>(
      *step->model, world, ddp_options);
  return {"gradient_as_bucket_view", [step, wrapped, &world] {
            step->run(*wrapped);
            world.clear_records();
          }};
}

TimedWork all_reduce_work(const PeerOptions& options, ProcessGroup& world) {
  Tensor buffer = Tensor::full({options.bytes / 4}, world.rank() + 1);
  world.all_reduce(buffer).wait();
  const double expected = world.size() * (world.size() + 1) / 2.0;
  const float* values = buffer.data<float>();
  SB_CHECK(std::all_of(values, values + buffer.numel(),
                       [&](float value) { return value == expected; }),
           "all_reduce: the sum of rank + 1 is not ", expected);
  // Sums of zeros stay finite, however often they are repeated.
  buffer.zero();
  return {options.backend, [buffer, &world] {
            world.all_reduce(buffer).wait();
            world.clear_records();
          }};
}

TimedWork make_work(const PeerOptions& options, ProcessGroup& world) {
  const std::string& work = options.work;
  if (work == "matmul") return matmul_work(options);
  if (work == "attention") return attention_work(options);
  if (work == "allreduce") return all_reduce_work(options, world);
  if (work == "step" || work == "images" || work == "ddp") {
    return step_work(options, world);
  }
  SB_FAIL("no work ", work,
          "; matmul, step, attention, allreduce, ddp, images");
}

/// Seconds for `count` calls of body on the slowest rank.
double slowest_seconds_of(ProcessGroup& world,
                          const std::function<void()>& body,
                          std::int64_t count) {
  world.barrier();
  const double own = seconds_of([&] {
    for (std::int64_t i = 0; i < count; ++i) body();
  });
  Tensor seconds = Tensor::full({1}, own, {DType::kF64});
  world.all_reduce(seconds, ReduceOp::kMax).wait();
  return seconds.item();
}

/// The next count that stdin asks for; 0 at `quit` and at the end.
std::int64_t next_command() {
  std::string line;
  if (!std::getline(std::cin, line) || line == "quit") return 0;
  std::int64_t count = 0;
  SB_CHECK(std::sscanf(line.c_str(), "run %" SCNd64, &count) == 1 && count > 0,
           "stdin: '", line, "'; give run N or quit");
  return count;
}

void serve(const PeerOptions& options, ProcessGroup& world) {
  // Threads per rank as asked, however many cores there are.
  RankContext context(RankContext::current().device, world.rank(),
                      options.threads);
  RankContext::Scope scope(context);
  TimedWork work = make_work(options, world);
  slowest_seconds_of(world, work.body, 3);
  const bool is_main = world.rank() == 0;
  if (is_main) {
    std::printf("ready {\"version\": \"shardbook\", \"variant\": \"%s\"}\n",
                work.variant.c_str());
    std::fflush(stdout);
  }
  while (true) {
    // Rank 0 tells the others how often to run; 0 ends them.
    Tensor message = Tensor::zeros({1}, {DType::kI64});
    if (is_main) message.fill(static_cast<double>(next_command()));
    world.broadcast(message, 0).wait();
    const std::int64_t count = message.data<std::int64_t>()[0];
    if (count == 0) return;
    const double seconds = slowest_seconds_of(world, work.body, count);
    if (!is_main) continue;
    std::printf("%.9f\n", seconds);
    std::fflush(stdout);
  }
}

int run_peer(const PeerOptions& options) {
  LaunchOptions launch;
  launch.backend = options.backend;
  // Ranks wait for the next command while the other side is measured.
  launch.timeout = std::chrono::hours(1);
  run_ranks(
      options.world_size, [&](ProcessGroup& world) { serve(options, world); },
      launch);
  return 0;
}

}  // namespace
}  // namespace shardbook::bench

int main(int argc, char** argv) {
  return shardbook::chapter_main([&] {
    return shardbook::bench::run_peer(shardbook::bench::parse(argc, argv));
  });
}
