#pragma once

// The errors of ranks, and pairs of calls that do not match, for suites that
// hold on several backends.

#include <functional>
#include <string>
#include <vector>

#include "comm/launch.h"
#include "comm/process_group.h"

namespace shardbook::test {

using Call = std::function<void(ProcessGroup&)>;

/// The error of each rank, and the error that run_ranks threw.
struct Outcome {
  std::vector<std::string> by_rank;
  std::string first_cause;
};

inline Outcome outcome_of(int world_size, const Call& body,
                          const LaunchOptions& options) {
  Outcome outcome;
  outcome.by_rank.resize(static_cast<std::size_t>(world_size));
  try {
    run_ranks(
        world_size,
        [&](ProcessGroup& world) {
          try {
            body(world);
          } catch (const std::exception& error) {
            outcome.by_rank[static_cast<std::size_t>(world.rank())] =
                error.what();
            throw;
          }
        },
        options);
  } catch (const std::exception& error) {
    outcome.first_cause = error.what();
  }
  return outcome;
}

struct Mismatch {
  const char* name;
  Call first, second;  ///< of rank 0 and of rank 1
  std::string first_text, second_text;

  void run(ProcessGroup& world) const {
    (world.rank() == 0 ? first : second)(world);
  }
};

inline Tensor zeros(std::int64_t n, DType dtype = DType::kF32) {
  return Tensor::zeros({n}, {dtype, Device()});
}

inline Call sum_of(std::int64_t n, DType dtype = DType::kF32,
                   ReduceOp op = ReduceOp::kSum) {
  return [=](ProcessGroup& world) {
    world.all_reduce(zeros(n, dtype), op).wait();
  };
}

inline Call broadcast_from(int root) {
  return [=](ProcessGroup& world) { world.broadcast(zeros(10), root).wait(); };
}

inline std::vector<Mismatch> mismatches() {
  return {{"Count", sum_of(10), sum_of(11), "all_reduce f32[10]",
           "all_reduce f32[11]"},
          {"LargeCount", sum_of(1 << 20), sum_of(1 << 19),
           "all_reduce f32[1048576]", "all_reduce f32[524288]"},
          {"DType", sum_of(10), sum_of(10, DType::kI32), "all_reduce f32[10]",
           "all_reduce i32[10]"},
          {"ReduceOp", sum_of(10), sum_of(10, DType::kF32, ReduceOp::kMax),
           "all_reduce f32[10]", "all_reduce f32[10] (max)"},
          {"Operation",
           [](ProcessGroup& world) {
             world.all_reduce(zeros(10), ReduceOp::kSum, "gradients").wait();
           },
           broadcast_from(0), "all_reduce f32[10] 'gradients'",
           "broadcast f32[10] (root 0)"},
          {"Root", broadcast_from(0), broadcast_from(1),
           "broadcast f32[10] (root 0)", "broadcast f32[10] (root 1)"},
          {"Order",
           [](ProcessGroup& world) {
             const Tensor x = zeros(10);
             Work work = world.all_reduce(x);
             world.barrier();
             work.wait();
           },
           [](ProcessGroup& world) {
             world.barrier();
             world.all_reduce(zeros(10)).wait();
           },
           "all_reduce f32[10]", "barrier"},
          {"Message",
           [](ProcessGroup& world) {
             world.send(zeros(10), 1).wait();  // copied: done at once
             world.barrier();
           },
           [](ProcessGroup& world) { world.recv(zeros(9), 0).wait(); },
           "send f32[10] to rank 1", "recv f32[9] from rank 0"}};
}

}  // namespace shardbook::test
