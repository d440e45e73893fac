// Shardbook's side of `./shardbook bench pytorch`: one work, timed on request.
//
//   pytorch_peer step --model gpt-micro --batch 8 --seq 128
//   pytorch_peer allreduce --bytes 67108864 --backend gloo --world-size 4
//
// The works and the protocol on stdin and stdout are stated in pytorch.py.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "bench/pytorch_peer.h"
#include "chapters/common/models/models.h"
#include "comm/launch.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"
#include "core/optim.h"

namespace shardbook::bench {
namespace {

std::int64_t read_number(const std::string& flag, const std::string& text) {
  const bool is_number =
      !text.empty() && text.size() < 16 &&
      text.find_first_not_of("0123456789") == std::string::npos;
  SB_CHECK(is_number && text != "0", flag, " ", text,
           ": give a positive integer");
  return std::stoll(text);
}

PeerOptions parse(const std::vector<std::string>& arguments) {
  SB_CHECK(arguments.size() % 2 == 1,
           "give a work, then options with a value each; see pytorch.py");
  PeerOptions options;
  options.work = arguments[0];
  for (std::size_t i = 1; i < arguments.size(); i += 2) {
    const std::string& flag = arguments[i];
    const std::string& value = arguments[i + 1];
    if (flag == "--model") {
      options.model = value;
    } else if (flag == "--backend") {
      options.backend = value;
    } else if (flag == "--size") {
      options.size = read_number(flag, value);
    } else if (flag == "--batch") {
      options.batch = read_number(flag, value);
    } else if (flag == "--seq") {
      options.seq = read_number(flag, value);
    } else if (flag == "--bytes") {
      options.bytes = read_number(flag, value);
    } else if (flag == "--world-size") {
      options.world_size = static_cast<int>(read_number(flag, value));
    } else if (flag == "--threads") {
      options.threads = static_cast<int>(read_number(flag, value));
    } else {
      SB_FAIL("unknown option ", flag, "; see pytorch.py");
    }
  }
  return options;
}

TimedWork matmul_work(const PeerOptions& options, ProcessGroup&) {
  const Shape shape = {options.size, options.size};
  Tensor a = Tensor::empty(shape), b = Tensor::empty(shape);
  fill_normal(a, 0, 1, 0, 1);
  fill_normal(b, 0, 2, 0, 1);
  // The product lies in the block that the allocator got back before.
  return {"matmul", [a, b] { matmul(a, b); }};
}

TimedWork step_work(const PeerOptions& options, ProcessGroup& world) {
  auto step = std::make_shared<TrainingStep>(options, world.rank());
  return {"one device", [step] {
            step->run([&](const Tensor& ids) { return (*step->model)(ids); });
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
  if (options.work == "matmul") return matmul_work(options, world);
  if (options.work == "step") return step_work(options, world);
  if (options.work == "allreduce") return all_reduce_work(options, world);
  if (options.work == "ddp") return ddp_work(options, world);
  if (options.work == "images") return images_work(options, world);
  SB_FAIL("no work ", options.work, "; matmul, step, allreduce, ddp, images");
}

/// Seconds for `count` calls of body: those of the slowest rank.
double seconds_of(ProcessGroup& world, const std::function<void()>& body,
                  std::int64_t count) {
  using Clock = std::chrono::steady_clock;
  world.barrier();
  const Clock::time_point start = Clock::now();
  for (std::int64_t i = 0; i < count; ++i) body();
  const std::chrono::duration<double> mine = Clock::now() - start;
  Tensor seconds = Tensor::full({1}, mine.count(), {DType::kF64});
  world.all_reduce(seconds, ReduceOp::kMax).wait();
  return seconds.item();
}

/// The next count that stdin asks for; 0 at `quit` and at the end.
std::int64_t next_command() {
  std::string line;
  if (!std::getline(std::cin, line) || line == "quit") return 0;
  SB_CHECK(line.rfind("run ", 0) == 0, "stdin: '", line,
           "'; say run N or quit");
  return read_number("run", line.substr(4));
}

void serve(const PeerOptions& options, ProcessGroup& world) {
  // Threads per rank as asked, however many cores there are.
  RankContext context(RankContext::current().device, world.rank(),
                      options.threads);
  RankContext::Scope scope(context);
  TimedWork work = make_work(options, world);
  seconds_of(world, work.body, 3);
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
    const double seconds = seconds_of(world, work.body, count);
    if (!is_main) continue;
    std::printf("%.9f\n", seconds);
    std::fflush(stdout);
  }
}

}  // namespace

TrainingStep::TrainingStep(const PeerOptions& options, int rank)
    : model(make_model(ModelConfig::read(options.model), InitOptions{})) {
  const std::int64_t vocab_size = ModelConfig::read(options.model).vocab_size;
  const std::int64_t count = options.batch * options.seq;
  // Random ids: the top bits of a linear congruential sequence.
  std::uint64_t state = 0x9e3779b97f4a7c15ULL + static_cast<unsigned>(rank);
  auto draw = [&] {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(count));
    for (std::int64_t& id : ids) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      id = static_cast<std::int64_t>(state >> 33) % vocab_size;
    }
    return Tensor::from_values(ids, {options.batch, options.seq});
  };
  inputs = draw();
  targets = draw();
}

void TrainingStep::run(const std::function<Tensor(const Tensor&)>& forward) {
  if (optimizer == nullptr) {
    OptimizerOptions adamw;
    adamw.lr = 1e-3;
    optimizer = make_optimizer("adamw", model->parameters(), adamw);
  }
  model->clear_grad();
  language_loss(forward(inputs), targets).backward();
  optimizer->step();
}

int run_peer(const std::vector<std::string>& arguments) {
  const PeerOptions options = parse(arguments);
  LaunchOptions launch;
  launch.backend = options.backend;
  // Ranks wait for the next command while the other side is measured.
  launch.timeout = std::chrono::hours(1);
  run_ranks(
      options.world_size, [&](ProcessGroup& world) { serve(options, world); },
      launch);
  return 0;
}

}  // namespace shardbook::bench

int main(int argc, char** argv) {
  try {
    return shardbook::bench::run_peer({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pytorch_peer: %s\n", error.what());
    return 2;
  }
}
