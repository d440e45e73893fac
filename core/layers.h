#pragma once

// The modules that models are made of. `name` is the module's path in its
// model. Weights are drawn from the streams of these names, so any rank can
// draw any part of any weight.

#include <memory>
#include <string>
#include <vector>

#include "core/module.h"
#include "core/ops.h"

namespace shardbook {

/// y = x W + b, W [in, out]. Starts from PyTorch's uniform(-1/sqrt(in), ..).
class Linear : public ModuleOf<Linear> {
 public:
  Linear() = default;
  Linear(const std::string& name, std::int64_t in, std::int64_t out,
         const InitOptions& init, bool with_bias = true);
  Tensor forward(const Tensor& x) override { return linear(x, weight, bias); }
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "Linear"; }

  Tensor weight;  ///< [in, out]
  Tensor bias;    ///< [out], or undefined
};

class LayerNorm : public ModuleOf<LayerNorm> {
 public:
  LayerNorm() = default;
  LayerNorm(std::int64_t width, const InitOptions& init, double eps = 1e-5);
  Tensor forward(const Tensor& x) override {
    return layer_norm(x, weight, bias, eps);
  }
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "LayerNorm"; }

  Tensor weight;  ///< [width]
  Tensor bias;    ///< [width]
  double eps = 1e-5;
};

/// See rms_norm. Starts from ones.
class RmsNorm : public ModuleOf<RmsNorm> {
 public:
  RmsNorm() = default;
  RmsNorm(std::int64_t width, const InitOptions& init, double eps = 1e-6);
  Tensor forward(const Tensor& x) override { return rms_norm(x, weight, eps); }
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "RmsNorm"; }

  Tensor weight;  ///< [width]
  double eps = 1e-6;
};

/// Rows of a table by index. Starts from normal(0, stddev).
class Embedding : public ModuleOf<Embedding> {
 public:
  Embedding() = default;
  Embedding(const std::string& name, std::int64_t rows, std::int64_t width,
            const InitOptions& init, double stddev = 0.02);
  Tensor forward(const Tensor& indices) override {
    return embedding(weight, indices);
  }
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "Embedding"; }

  Tensor weight;  ///< [rows, width]
};

class Dropout : public ModuleOf<Dropout> {
 public:
  explicit Dropout(double p = 0) : p(p) {}
  Tensor forward(const Tensor& x) override {
    return is_training() ? dropout(x, p) : x;
  }
  void members(MemberVisitor&) override {}
  std::string type_name() const override { return "Dropout"; }

  double p;
};

class Relu : public ModuleOf<Relu> {
 public:
  Tensor forward(const Tensor& x) override { return relu(x); }
  void members(MemberVisitor&) override {}
  std::string type_name() const override { return "Relu"; }
};

/// Convolution of images [n, h, w, in] -> [n, oh, ow, out]; see conv2d. Starts
/// from normal(0, sqrt(2 / (out size^2))): Kaiming's with fan-out, as in
/// torchvision's ResNet.
class Conv2d : public ModuleOf<Conv2d> {
 public:
  Conv2d() = default;
  Conv2d(const std::string& name, std::int64_t in, std::int64_t out,
         std::int64_t size, std::int64_t stride, const InitOptions& init);
  Tensor forward(const Tensor& x) override {
    return conv2d(x, weight, Tensor(), stride, padding);
  }
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "Conv2d"; }

  Tensor weight;  ///< [out, in, size, size]
  std::int64_t stride = 1;
  std::int64_t padding = 0;  ///< size / 2 by default
};

/// Batch normalisation over [n, c], or images [n, h, w, c]. Running statistics
/// are updated with the unbiased variance. `sum_over_ranks` makes it a
/// synchronised one.
///
/// Takes one tensor, or two: the second is added before the ReLU.
///
/// Each piece of a split mini-batch is normalised by its own statistics. With
/// `deferred`, the running statistics stay as they are until `commit`, which
/// updates them once, from the sums over all pieces since the last commit.
/// Counting pieces would not work: a split may give fewer. (torchgpipe's
/// DeferredBatchNorm stores the biased variance here; this one stores the
/// unbiased, as without pieces.) Pieces that are recomputed count once.
class BatchNorm : public ModuleOf<BatchNorm> {
 public:
  BatchNorm() = default;
  BatchNorm(std::int64_t channels, const InitOptions& init, double eps = 1e-5,
            double momentum = 0.1);
  Tensor forward(const Tensor& x) override { return normalize(x, Tensor()); }
  Tensors forward_all(const Tensors& inputs) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "BatchNorm"; }
  /// A deferred module's sums since the last commit, of its values and of their
  /// squares, f64 [c] each; empty without pieces. Ranks that have seen equally
  /// many values may sum these in place before all of them commit.
  Tensors pending() const;
  /// Ends a mini-batch of a deferred module; does nothing without pieces.
  /// `pending` holds the sums of `num_ranks` ranks.
  void commit(int num_ranks = 1);

  Tensor weight;        ///< [c]
  Tensor bias;          ///< [c]
  Tensor running_mean;  ///< [c], buffer
  Tensor running_var;   ///< [c], buffer
  double eps = 1e-5;
  double momentum = 0.1;
  bool relu = false;
  bool deferred = false;
  SumOverRanks sum_over_ranks;

 private:
  Tensor normalize(const Tensor& x, const Tensor& addend);
  void remember(const BatchNormResult& result);
  void update_running(const Tensor& mean, const Tensor& variance, double count);

  // Sums over the pieces since the last commit.
  Tensor sum_, sum_of_squares_;  // f64 [c]
  double count_ = 0;
};
/// Defer or commit the statistics of every BatchNorm below `module`.
void defer_batch_norms(Module& module, bool on = true);
void commit_batch_norms(Module& module, int num_ranks = 1);
/// `pending` of every BatchNorm below `module`.
Tensors pending_statistics(Module& module);

/// The largest of each window; see max_pool2d.
class MaxPool2d : public ModuleOf<MaxPool2d> {
 public:
  MaxPool2d(std::int64_t size, std::int64_t stride, std::int64_t padding)
      : size(size), stride(stride), padding(padding) {}
  Tensor forward(const Tensor& x) override {
    return max_pool2d(x, size, stride, padding);
  }
  void members(MemberVisitor&) override {}
  std::string type_name() const override { return "MaxPool2d"; }

  std::int64_t size, stride, padding;
};

/// Modules one after another, named "0", "1", ...
class Sequential : public Module {
 public:
  Sequential() = default;
  Sequential(const Sequential& other);
  Sequential& operator=(const Sequential& other);
  template <typename M>
  Sequential& add(M module) {
    modules_.push_back(std::make_unique<M>(std::move(module)));
    return *this;
  }
  std::size_t size() const { return modules_.size(); }
  Module& operator[](std::size_t i) { return *modules_[i]; }

  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::unique_ptr<Module> clone() const override {
    return std::make_unique<Sequential>(*this);
  }
  std::string type_name() const override { return "Sequential"; }

 private:
  std::vector<std::unique_ptr<Module>> modules_;
};

}  // namespace shardbook
