#pragma once

// What the notebook 02_ddp calls: gradients of the lesson's model, runs of DDP,
// and pictures of what they counted.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/02_ddp/bucket.h"
#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/common/lesson.h"
#include "chapters/programs/programs.h"
#include "notebooks/lessons.h"
#include "notebooks/live_ranks.h"

namespace notes {

using namespace shardbook::notebook;

/// Replaces the gradients of a model by their means over the ranks.
using Average = void (*)(Module& model, ProcessGroup& dp);

/// The norm of the gradient of these samples.
inline double backward(Module& model, const Batch& batch) {
  language_loss(model(batch.inputs), batch.targets).backward();
  return grad_norm(model.parameters());
}

/// The norms of three gradients: of this rank's samples, of their average, and
/// of the whole batch on one device.
inline std::vector<double> gradient_norms(ProcessGroup& dp, Average average) {
  Gpt mine(lesson::config(), lesson::init());
  const double own = backward(mine, lesson::batch(0, dp.rank(), dp.size()));
  average(mine, dp);
  Gpt whole(lesson::config(), lesson::init());
  return {own, grad_norm(mine.parameters()), backward(whole, lesson::batch(0))};
}

/// A row for each of four ranks.
inline Picture norms(Average average) {
  return by_rank({"rank", "own samples", "after averaging", "one device"},
                 on_ranks(4, gradient_norms, average), 4);
}

/// Small buckets: 0.05 MiB for the first, 0.2 MiB for the others.
inline const std::string kSmall =
    "02_ddp --world-size 4 --batch 8 --steps 12 --first-bucket-mb 0.05 "
    "--bucket-mb 0.2" +
    kNano;

/// Eight ranks of the cluster `textbook`.
inline std::string on_textbook(const std::string& model, std::int64_t batch,
                               std::int64_t seq) {
  return joined("02_ddp --world-size 8 --steps 3", kTextbook, " --model ",
                model, " --batch ", batch, " --seq ", seq);
}

/// The buckets of the first step, in the order in which they leave.
inline Picture first_buckets(const std::string& line) {
  ddp::StrategyOptions setup;
  const Options options = options_of(line, setup);
  const LoadedModel loaded = build_model(options);
  std::vector<ddp::BucketItem> items;
  for (const Tensor& each : loaded.model->parameters()) {
    items.push_back({each.bytes(), each.dtype(), each.device()});
  }
  const auto bytes = [](double mb) {
    return static_cast<std::int64_t>(mb * (1 << 20));
  };
  std::vector<Bar> all;
  for (const ddp::BucketMembers& bucket :
       ddp::initial_buckets(items, {bytes(setup.ddp.first_bucket_mb),
                                    bytes(setup.ddp.bucket_cap_mb)})) {
    Bar bar;
    for (const int i : bucket) {
      bar.value +=
          static_cast<double>(items[static_cast<std::size_t>(i)].bytes);
    }
    bar.name = joined("bucket ", all.size(), ", tensors: ", bucket.size());
    all.push_back(bar);
  }
  return bars("In the first step, the token table's bucket leaves last", all,
              {"KiB", 1024}, "comm");
}

/// This rank's part of a batch.
inline Batch own_samples(const Options& options, const ModelConfig& config,
                         ProcessGroup& world, int step) {
  return Dataset::open(options, config)
      .batch(step, options.batch, {world.rank(), world.size()},
             options.batch / world.size());
}

/// The time of a step over the size of its buckets.
inline Picture steps_with(const std::string& line,
                          const std::vector<double>& bucket_mbs) {
  const auto bar_of = [&](double mb) {
    return Bar{fixed(mb, mb < 1 ? 3 : 0) + " MiB",
               step_s(run(joined(line, " --first-bucket-mb ", std::min(mb, 1.0),
                                 " --bucket-mb ", mb)))};
  };
  return bars("Small buckets pay latencies, large ones leave late",
              mapped(bucket_mbs, bar_of), {"ms", 1e-3});
}

/// Exposed communication of GPT-2 XL over the tokens of a device. The lines
/// across are the time of all gradients, and that of the last bucket.
inline Picture exposed(const std::vector<std::int64_t>& tokens,
                       double all_gradients_s) {
  const auto bar_of = [](std::int64_t each) {
    return Bar{std::to_string(each),
               exposed_s(run(on_textbook("gpt2-xl", 8 * each / 250, 250) +
                             " --bucket-mb 100"))};
  };
  Bar last_bucket = bar_of(3500);
  last_bucket.name = "last bucket";
  return curve("Above 1750 tokens, little more than the last bucket is exposed",
               mapped(tokens, bar_of), "tokens each",
               {"all gradients", all_gradients_s}, last_bucket, {"ms", 1e-3});
}

/// The gradient of a weight w in the loss (w x_i)^2 / 2 at w = 1 is x_i^2.
inline bool are_weights_right(double w0, double w1) {
  const double g0 = (1 + 4 + 9 + 16 + 25) / 5.0, g1 = (36 + 49 + 64) / 3.0;
  const double mean = (1 + 4 + 9 + 16 + 25 + 36 + 49 + 64) / 8.0;
  return std::abs(w0 * g0 + w1 * g1 - mean) < 1e-9 &&
         std::abs(w0 + w1 - 1) < 1e-9;
}

/// What the ledger books for an all-reduce of psi elements of e bytes.
inline double booked_bytes(double psi, double e, double d) {
  return e * booked_elements(CommOp::kAllReduce, psi, d);
}

}  // namespace notes
