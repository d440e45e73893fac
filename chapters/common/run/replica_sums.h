#pragma once

// Gradients of one device that stands for several replicas: it sums them as ranks
// do, replica by replica.

#include <utility>
#include <vector>

#include "core/context.h"
#include "core/inplace.h"
#include "core/tensor.h"

namespace shardbook {

/// Sums gradients over replicas, after each has summed its own.
class ReplicaSums {
 public:
  /// A replica's gradients count `share` times. Of parameter i, `joint[i]`
  /// replicas in a row are one sum before they count; empty: one.
  ReplicaSums(Tensors parameters, double share, std::vector<int> joint = {})
      : parameters_(std::move(parameters)),
        share_(share),
        joint_(std::move(joint)),
        sums_(parameters_.size()) {
    joint_.resize(parameters_.size(), 1);
  }

  /// Adds a replica's gradients, and clears them for the next replica; it was
  /// number `count`, from 1 on.
  void take(std::size_t count) {
    const NoGrad no_grad;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const Tensor grad = parameters_[i].grad();
      const bool goes_on = count % static_cast<std::size_t>(joint_[i]) != 0;
      if (!grad.defined() || goes_on) continue;
      if (share_ != 1) scale_in_place(grad, share_);
      if (sums_[i].defined()) {
        add_into(sums_[i], grad);
      } else {
        sums_[i] = grad;
      }
      parameters_[i].clear_grad();
    }
  }
  /// The sums become the gradients.
  void give() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].set_grad(std::exchange(sums_[i], {}));
    }
  }

 private:
  Tensors parameters_;
  double share_;
  std::vector<int> joint_;
  Tensors sums_;
};

}  // namespace shardbook
