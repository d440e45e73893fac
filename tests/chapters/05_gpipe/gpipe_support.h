#pragma once

// Small models for the tests of stages and pipelines.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/common/pipeline/stages.h"
#include "comm/launch.h"
#include "core/check.h"
#include "core/ops.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace shardbook::gpipe_test {

inline std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// i64 [rows, seq], all different from row to row.
inline Tensor tokens_of(std::int64_t rows, std::int64_t seq,
                        std::int64_t vocab) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < rows * seq; ++i) {
    tokens.push_back((i * i * 7 + 3 * i + 1) % vocab);
  }
  return Tensor::from_values<std::int64_t>(tokens, {rows, seq});
}

/// [rows, width], standard normal.
inline Tensor rows_of(std::int64_t rows, std::int64_t width, DType dtype) {
  Tensor x = Tensor::empty({rows, width}, {dtype, Device()});
  fill_normal(x, /*seed=*/11, /*stream=*/1, 0, 1);
  return x;
}

/// y = tanh(x W + b), with dropout; adds what it pops, and stashes its result.
class SkipLayer : public ModuleOf<SkipLayer> {
 public:
  SkipLayer(std::string name, std::int64_t width, const InitOptions& init,
            double dropout, std::size_t num_stashes)
      : name_(std::move(name)),
        linear_(name_, width, width, init),
        dropout_(dropout),
        num_stashes_(num_stashes) {}
  Tensors forward_all(const Tensors& inputs) override {
    Tensor y = dropout_(tanh(linear_(inputs[0])));
    for (std::size_t i = 1; i < inputs.size(); ++i) y = add(y, inputs[i]);
    return Tensors(1 + num_stashes_, y);
  }
  void members(MemberVisitor& visit) override { visit.module(name_, linear_); }
  std::string type_name() const override { return "SkipLayer"; }

 private:
  std::string name_;
  Linear linear_;
  Dropout dropout_;
  std::size_t num_stashes_;
};

/// Linear layers of one width, with skips from layer to layer (-1: none).
class SkipNet : public LayerList {
 public:
  SkipNet(int size, std::int64_t width,
          std::vector<std::pair<int, int>> skips = {},
          std::string shared_name = "", double dropout = 0)
      : size_(size),
        width_(width),
        skips_(std::move(skips)),
        shared_name_(std::move(shared_name)),
        dropout_(dropout) {}
  int size() const override { return size_; }
  std::string name(int layer) const override {
    return "layer" + std::to_string(layer);
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    return std::make_unique<SkipLayer>(name(layer), width_, init, dropout_,
                                       skips(layer).stash.size());
  }
  Skips skips(int layer) const override {
    Skips result;
    for (const auto& [from, to] : skips_) {
      const std::string name =
          shared_name_.empty() ? "net/" + std::to_string(from) : shared_name_;
      if (from == layer) result.stash.push_back(name);
      if (to == layer) result.pop.push_back(name);
    }
    return result;
  }

 private:
  int size_;
  std::int64_t width_;
  std::vector<std::pair<int, int>> skips_;
  std::string shared_name_;
  double dropout_;
};

/// A list that the caller keeps.
inline std::shared_ptr<const LayerList> borrowed(const LayerList& layers) {
  return {&layers, [](const LayerList*) {}};
}

/// Micro-batches of rows of one width, compared with other rows.
class RowsFeed : public pipeline::Feed {
 public:
  RowsFeed(std::vector<MicroBatch> pieces, std::int64_t width, DType dtype)
      : pieces_(std::move(pieces)), width_(width), dtype_(dtype) {
    for (const MicroBatch& each : pieces_) all_rows_ += each.rows;
  }
  pipeline::Piece piece(int b) const override {
    const MicroBatch& rows = pieces_[at(b)];
    return {3, rows.slice, rows.rows,
            static_cast<double>(rows.rows) / static_cast<double>(all_rows_)};
  }
  Tensors inputs(int b) override { return {rows_of_zeros(b)}; }
  Tensor loss(int b, const Tensors& outputs) override {
    return mse_loss(outputs[0], rows_of_zeros(b));
  }
  Tensors example(std::int64_t rows) const override {
    return {Tensor::empty({rows, width_}, {dtype_, Device::meta()})};
  }
  DType dtype() const override { return dtype_; }

 private:
  Tensor rows_of_zeros(int b) const {
    const MemoryScope kind(MemoryKind::kInput);
    return Tensor::zeros({pieces_[at(b)].rows, width_}, {dtype_, Device()});
  }

  std::vector<MicroBatch> pieces_;
  std::int64_t width_, all_rows_ = 0;
  DType dtype_;
};

}  // namespace shardbook::gpipe_test
