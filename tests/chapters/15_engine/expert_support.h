#pragma once

// The documents' net for CIFAR-10 with layers of experts: under an engine, and on
// one device.

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/13_moe/cifar.h"
#include "chapters/13_moe/groups.h"
#include "comm/device_mesh.h"
#include "core/autograd.h"
#include "tests/chapters/15_engine/engine_support.h"

namespace shardbook::engine {

inline constexpr std::int64_t kImages = 16;  // of a step, over all ranks
inline constexpr int kSteps = 3;

inline moe::ConvNetOptions documents_net(DType dtype = DType::kF64) {
  moe::ConvNetOptions net;
  net.num_experts = {4, 8};
  net.moe.use_residual = true;
  net.moe.gate.min_capacity = 1;  // drops some
  net.moe.aux_coefficient = 0.3;
  net.seed = 2;
  net.dtype = dtype;
  return net;
}

inline const moe::CifarImages& images() {
  static const moe::CifarImages all = moe::synthetic_cifar10(40, 1);
  return all;
}

/// Piece `piece` of `parts` of step k, and the random numbers of its place.
inline Batch piece_of(std::int64_t k, std::int64_t piece, std::int64_t parts,
                      DType dtype) {
  RandomState& random = RankContext::current().random;
  random.seed = 2;
  random.step = static_cast<std::uint64_t>(k);
  random.batch = {piece, parts};
  random.next_op = 0;
  return moe::cifar_batch(images(), {k * kImages + piece, parts},
                          kImages / parts, dtype);
}

/// Stage and micro-steps, by SGD, which shows the scale of gradients.
inline DeepSpeedConfig config_with(int stage, std::int64_t g,
                                   const std::string& more = "",
                                   const std::string& zero = "") {
  const bool clips = more.find("gradient_clipping") != std::string::npos;
  const bool has_optimizer = more.find("\"optimizer\"") != std::string::npos;
  return parse("{\"train_batch_size\": " + std::to_string(kImages) +
               ", \"gradient_accumulation_steps\": " + std::to_string(g) +
               (clips ? "" : ", \"gradient_clipping\": 0") +
               (has_optimizer
                    ? ""
                    : R"(, "optimizer": {"type": "SGD", "params": {"lr": 0.3,
                  "momentum": 0.5}}, "zero_allow_untested_optimizer": true)") +
               R"(, "zero_optimization": {"stage": )" + std::to_string(stage) +
               zero + "}" + more + "}");
}

struct Course {
  Values losses, norms;
  std::vector<NamedTensor> weights;  ///< whole, on rank 0
};

/// The net on one device, which routes each piece of a rank by itself. `wrong`
/// changes the gradients before each update.
inline Course on_one_device(
    const moe::ConvNetOptions& options, int parts, double clip = 0,
    const std::function<void(const NamedTensor&)>& wrong = {}) {
  return on_ranks(1, [&](ProcessGroup&) {
    const auto record = std::make_shared<moe::MoeRecord>();
    record->loss_scale = 1.0 / parts;
    moe::ConvNet net(options, {}, record);
    const auto optimizer =
        make_optimizer("sgd", net.parameters(), {.lr = 0.3, .momentum = 0.5});
    Course course;
    for (int k = 0; k < kSteps; ++k) {
      double mean = 0;
      for (int piece = 0; piece < parts; ++piece) {
        const Batch batch = piece_of(k, piece, parts, options.dtype);
        const Tensor loss = language_loss(net(batch.inputs), batch.targets);
        mean += loss.item() / parts;
        autograd::backward({loss},
                           {Tensor::full({}, 1.0 / parts, loss.options())});
      }
      for (const NamedTensor& each : net.named_parameters()) {
        if (wrong) wrong(each);
      }
      const double norm = grad_norm(net.parameters());
      optimizer->step(clip > 0 ? clip_factor(norm, clip) : 1);
      net.clear_grad();
      course.losses.push_back(mean);
      course.norms.push_back(norm);
    }
    course.weights = net.named_parameters();
    return course;
  })[0];
}

/// The net of one rank under an engine.
struct Rank {
  Rank(const moe::ConvNetOptions& options, const DeepSpeedConfig& config,
       ProcessGroup& world, int ep, const InitializeArgs& args = {},
       const std::function<void(moe::ConvNet&)>& prepare = {})
      : mesh(world, moe::expert_topology({.world = world.size(), .ep = ep})),
        net(options, {.ep = &mesh.group("ep")}),
        world(world) {
    if (prepare) prepare(net);
    engine = initialize(net, config, world, args).engine;
  }

  Tensor loss(std::int64_t k, std::int64_t micro) {
    const std::int64_t d = world.size();
    const std::int64_t parts = d * engine->gradient_accumulation_steps();
    const DType dtype = net.parameters()[0].dtype();
    const Batch batch = piece_of(k, world.rank() + d * micro, parts, dtype);
    return language_loss((*engine)(batch.inputs), batch.targets);
  }
  /// The mean loss over all ranks.
  double step(std::int64_t k) {
    const std::int64_t g = engine->gradient_accumulation_steps();
    double mean = 0;
    for (std::int64_t i = 0; i < g; ++i) {
      const Tensor own = loss(k, i);
      mean += own.item() / static_cast<double>(g * world.size());
      engine->backward(own);
      engine->step();
    }
    return sum_over_ranks(world, mean, "loss");
  }

  DeviceMesh mesh;
  moe::ConvNet net;
  ProcessGroup& world;
  std::unique_ptr<Engine> engine;
};

inline Course course_of(Rank& rank) {
  Course course;
  for (int k = 0; k < kSteps; ++k) {
    course.losses.push_back(rank.step(k));
    course.norms.push_back(rank.engine->get_global_grad_norm());
  }
  course.weights = rank.engine->full_state();
  return course;
}

inline Course under_engine(const moe::ConvNetOptions& options,
                           const DeepSpeedConfig& config, int ranks, int ep) {
  return on_ranks(ranks, [&](ProcessGroup& world) {
    Rank rank(options, config, world, ep);
    return course_of(rank);
  })[0];
}

/// The largest difference between losses, norms and weights.
inline double distance(const Course& a, const Course& b) {
  const Values x = values_of(a.weights), y = values_of(b.weights);
  double most =
      std::max(largest_gap(a.losses, b.losses), largest_gap(a.norms, b.norms));
  return larger(most, largest_gap(x, y));
}

}  // namespace shardbook::engine
