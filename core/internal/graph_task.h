#pragma once

// One run of backward through the graph. Read by core/*.cpp only.

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/internal/graph.h"

namespace shardbook::autograd {

/// One call of `backward`: how many gradients each node waits for, and the
/// nodes that are ready.
class GraphTask {
 public:
  GraphTask(bool retain_graph, GraphTask* outer)
      : retain_graph_(retain_graph), outer_(outer) {}

  /// Drops its handles to outputs and gradients as soon as the graph has them.
  void run(Tensors outputs, Tensors grad_outputs);
  void add_callback(std::function<void()> callback) {
    if (outer_ != nullptr) {
      outer_->add_callback(std::move(callback));
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    callbacks_.push_back(std::move(callback));
  }

 private:
  /// A gradient that comes from an input of the operation `from`.
  struct Source {
    std::uint64_t from;
    std::size_t input;
    std::size_t output_index;
  };
  struct Arrival {
    Source source;
    Tensor grad;
  };
  struct Inputs {
    Tensors grads;
    int missing = 0;
    // With several devices: gradients that have arrived but are not added yet,
    // and all expected ones in the order in which they are added.
    std::vector<Arrival> arrivals;
    std::vector<Source> expected;
    std::size_t num_added = 0;
    bool all_from_here = true;  ///< from nodes of the same device
  };
  struct Later {
    bool operator()(const std::shared_ptr<Node>& a,
                    const std::shared_ptr<Node>& b) const {
      return a->sequence < b->sequence;
    }
  };
  using ReadyQueue =
      std::priority_queue<std::shared_ptr<Node>,
                          std::vector<std::shared_ptr<Node>>, Later>;

  void discover(const std::vector<std::shared_ptr<Node>>& roots);
  void order_expected();
  void deliver(const Edge& edge, const Tensor& grad, std::uint64_t from,
               std::size_t input);
  static void add_to(Tensor& slot, const Tensor& grad);
  void add_what_came(Node& node);
  Tensors take_gradients(Node& node);
  void arrive(const Edge& edge);
  void execute(const std::shared_ptr<Node>& node);
  void work(const Device& device);
  std::size_t queue_of(const Device& device) const {
    return static_cast<std::size_t>(
        std::find(devices_.begin(), devices_.end(), device) - devices_.begin());
  }

  const bool retain_graph_;
  GraphTask* const outer_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<Node*, Inputs> inputs_;
  std::vector<Device> devices_;
  std::vector<ReadyQueue> ready_;  // one per device
  std::int64_t unfinished_ = 0;
  std::exception_ptr error_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace shardbook::autograd
