#include "chapters/03_zero_fsdp/fsdp/fsdp_bill.h"

#include <algorithm>

namespace shardbook::fsdp {
namespace {

bool is_zero3(const FsdpOptions& options) {
  return options.sharding_strategy == ShardingStrategy::kFullShard ||
         options.sharding_strategy == ShardingStrategy::kHybridShard;
}

/// A kind of memory, in bytes.
struct Level {
  double now = 0, peak = 0;
  void add(double bytes) {
    now += bytes;
    peak = std::max(peak, now);
  }
};

/// Whether the module `path` lies in the module `parent`, below it.
bool is_below(const std::string& path, const std::string& parent) {
  return path.compare(0, parent.size() + 1, parent + ".") == 0;
}

/// Units as a tree, in the order of definition. Place 0 is the root's, which
/// may have no parameters.
struct Node {
  const FlatParameter* unit = nullptr;
  std::string path;  ///< "" for the root
  std::vector<std::size_t> children;
  /// Its inputs need no gradient, as those of the model: the end of backward
  /// is the end of its own.
  bool ends_last = false;
};

std::vector<Node> tree_of(const FullyShardedDataParallel& fsdp) {
  std::vector<Node> nodes(1);
  std::vector<std::size_t> around = {0};
  for (const FlatParameter* unit : fsdp.units()) {
    if (nodes[0].unit == nullptr && nodes.size() == 1 &&
        fsdp.root_has_parameters()) {
      nodes[0].unit = unit;
      continue;
    }
    while (around.size() > 1 &&
           !is_below(unit->name(), nodes[around.back()].path)) {
      around.pop_back();
    }
    nodes[around.back()].children.push_back(nodes.size());
    around.push_back(nodes.size());
    nodes.push_back({unit, unit->name(), {}, false});
  }
  // The module of the first parameter reads the model's inputs
  const std::string first = fsdp.first_parameter();
  for (Node& node : nodes) {
    node.ends_last = node.path.empty() || is_below(first, node.path);
  }
  return nodes;
}

/// The events of fsdp.cpp and flat_parameter.cpp, on bytes instead of tensors.
class Walk {
 public:
  Walk(const FullyShardedDataParallel& fsdp, const StepPlan& plan,
       double beside)
      : options_(fsdp.options()),
        nodes_(tree_of(fsdp)),
        recomputed_(plan.recomputed),
        state_(nodes_.size()),
        has_shard_grad_(nodes_.size()),
        has_grads_(nodes_.size()),
        beside_(beside) {
    list(0);
    for (const Node& node : nodes_) {
      if (node.unit == nullptr) continue;
      if (!node.unit->is_on_host()) {
        parameters.add(bytes(node.unit->shard_bytes()));
      }
      // Allocated once when the unit is made, and freed
      parameters.add(bytes(node.unit->full_bytes()));
      parameters.add(-bytes(node.unit->full_bytes()));
    }
  }

  void micro_step(bool is_first, bool is_last, bool reduces) {
    reduces_ = reduces;
    prefetches_forward_ = options_.forward_prefetch && !is_first;
    has_ended_.assign(nodes_.size(), false);
    forward(0);
    if (is_last) messages.add(beside_);
    backward(0);
    // The end of backward: units not reduced yet, the last-defined first
    for (std::size_t i = nodes_.size(); i-- > 0;) reduce(i);
    for (std::size_t i = 0; i < nodes_.size(); ++i) free(i);
    finish_reduction();
    if (is_last) messages.add(-beside_);
  }

  void update() {
    messages.add(8);  // the norm
    messages.add(-8);
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (has_shard_grad_[i]) gradients.add(-shard_grad(i));
      has_shard_grad_[i] = false;
    }
  }

  Level parameters, gradients, messages;

 private:
  enum class State { kSharded, kGathering, kFull };

  double bytes(std::int64_t n) const { return static_cast<double>(n); }
  double shard_grad(std::size_t i) const {
    return nodes_[i].unit->is_on_host()
               ? 0
               : bytes(nodes_[i].unit->shard_grad_bytes());
  }

  // Units with parameters in the order in which forwards begin and end
  void list(std::size_t i) {
    if (nodes_[i].unit != nullptr) begun_.push_back(i);
    for (const std::size_t child : nodes_[i].children) list(child);
    if (nodes_[i].unit != nullptr) finished_.push_back(i);
  }

  void forward(std::size_t i) {
    start(i);
    if (prefetches_forward_) start_neighbour(begun_, i, +1);
    finish(i);
    for (const std::size_t child : nodes_[i].children) forward(child);
    if (i > 0 && is_zero3(options_)) free(i);
  }

  void backward(std::size_t i) {
    start(i);
    if (options_.backward_prefetch == BackwardPrefetch::kPre) {
      start_neighbour(finished_, i, -1);
    }
    finish(i);
    prepare(i);
    const std::vector<std::size_t>& children = nodes_[i].children;
    std::string block;
    for (std::size_t c = children.size(); c-- > 0;) {
      // A block between this unit and its children runs its forward again
      const std::string next = recomputed_between(i, children[c]);
      if (!next.empty() && next != block) {
        for (const std::size_t child : children) {
          if (recomputed_between(i, child) == next) forward_again(child);
        }
      }
      block = next;
      backward(children[c]);
    }
    if (nodes_[i].ends_last) return;
    has_ended_[i] = true;
    free(i);
    if (options_.backward_prefetch == BackwardPrefetch::kPost) {
      start_neighbour(finished_, i, -1);
    }
    reduce(i);
  }

  void forward_again(std::size_t i) {
    start(i);
    finish(i);
    prepare(i);
    for (const std::size_t child : nodes_[i].children) forward_again(child);
  }

  /// The recomputed module in which `child` lies, and its parent does not lie
  /// below it; "" where there is none.
  std::string recomputed_between(std::size_t parent, std::size_t child) const {
    for (const std::string& module : recomputed_) {
      if (is_below(nodes_[child].path, module) &&
          !is_below(nodes_[parent].path, module)) {
        return module;
      }
    }
    return "";
  }

  void start_neighbour(const std::vector<std::size_t>& order, std::size_t i,
                       int distance) {
    const auto at = std::find(order.begin(), order.end(), i);
    if (at == order.end()) return;
    const auto place = at - order.begin() + distance;
    if (place < 0 || place >= static_cast<std::ptrdiff_t>(order.size())) return;
    const std::size_t neighbour = order[static_cast<std::size_t>(place)];
    if (distance > 0 || !has_ended_[neighbour]) start(neighbour);
  }

  void start(std::size_t i) {
    if (nodes_[i].unit == nullptr || state_[i] != State::kSharded ||
        nodes_[i].unit->full_bytes() == 0) {
      return;
    }
    state_[i] = State::kGathering;
    messages.add(bytes(nodes_[i].unit->staging_bytes()));
    if (nodes_[i].unit->staging_bytes() == 0) {
      parameters.add(bytes(nodes_[i].unit->full_bytes()));
    }
  }
  void finish(std::size_t i) {
    if (state_[i] != State::kGathering) return;
    state_[i] = State::kFull;
    if (nodes_[i].unit->staging_bytes() == 0) return;
    parameters.add(bytes(nodes_[i].unit->full_bytes()));
    messages.add(-bytes(nodes_[i].unit->staging_bytes()));
  }
  void free(std::size_t i) {
    finish(i);
    if (state_[i] != State::kFull) return;
    state_[i] = State::kSharded;
    parameters.add(-bytes(nodes_[i].unit->full_bytes()));
  }

  void prepare(std::size_t i) {
    if (nodes_[i].unit == nullptr || has_grads_[i]) return;
    gradients.add(bytes(nodes_[i].unit->grads_bytes()));
    has_grads_[i] = true;
  }
  void reduce(std::size_t i) {
    if (!has_grads_[i] || !reduces_) return;
    finish_reduction();
    const FlatParameter& unit = *nodes_[i].unit;
    const double grads = bytes(unit.grads_bytes());
    if (unit.sends_copy()) {
      messages.add(bytes(unit.message_bytes()));
      gradients.add(-grads);
    }
    if (unit.ranks() > 1) {
      (unit.output_is_grad() ? gradients : messages)
          .add(bytes(unit.output_bytes()));
    }
    has_grads_[i] = false;
    is_reducing_ = true;
    reducing_ = i;
  }
  void finish_reduction() {
    if (!is_reducing_) return;
    is_reducing_ = false;
    const FlatParameter& unit = *nodes_[reducing_].unit;
    const bool is_first = !has_shard_grad_[reducing_];
    has_shard_grad_[reducing_] = true;
    // The arrived sum: of its own, or (without a shard group) the message
    Level& home = unit.sends_copy() ? messages : gradients;
    const double message = unit.sends_copy() ? bytes(unit.message_bytes())
                                             : bytes(unit.grads_bytes());
    Level& arrived = unit.ranks() == 1       ? home
                     : unit.output_is_grad() ? gradients
                                             : messages;
    const double sum = unit.ranks() == 1 ? message : bytes(unit.output_bytes());
    if (unit.ranks() > 1) home.add(-message);
    if (unit.output_is_grad()) {
      arrived.add(-sum);
      gradients.add(sum);
      if (!is_first) gradients.add(-sum);
      return;
    }
    (is_first ? gradients : messages).add(shard_grad(reducing_));
    if (!is_first) messages.add(-shard_grad(reducing_));
    arrived.add(-sum);
  }

  const FsdpOptions& options_;
  const std::vector<Node> nodes_;
  const std::vector<std::string> recomputed_;
  std::vector<std::size_t> begun_, finished_;
  std::vector<State> state_;
  std::vector<bool> has_shard_grad_, has_grads_;
  std::vector<bool> has_ended_;  ///< backward has left it behind
  const double beside_;
  bool prefetches_forward_ = false, reduces_ = true;
  bool is_reducing_ = false;
  std::size_t reducing_ = 0;
};

}  // namespace

double predicted_bytes(const FullyShardedDataParallel& fsdp,
                       const StepPlan& plan) {
  const auto steps = static_cast<double>(plan.steps);
  const auto micro = static_cast<double>(plan.micro_steps);
  const double reductions = plan.no_sync ? 1 : micro;
  double total = 0, p = 1;
  const auto units = fsdp.units();
  for (std::size_t i = 0; i < units.size(); ++i) {
    const FlatParameter& unit = *units[i];
    p = static_cast<double>(unit.ranks());
    // Forward and backward; the root (and SHARD_GRAD_OP) keeps what it has
    const bool is_root = i == 0 && fsdp.root_has_parameters();
    const double gathers = unit.ranks() == 1                      ? 0
                           : is_zero3(fsdp.options()) && !is_root ? 2
                                                                  : 1;
    total +=
        micro * gathers * (p - 1) / p * static_cast<double>(unit.full_bytes());
    // Gradients, in the shards' group and then among the replicas
    const double message =
        static_cast<double>(unit.grad_message_numel()) *
        static_cast<double>(dtype_bytes(unit.reduce_dtype()));
    total += reductions * (p - 1) / p * message;
    if (unit.groups().replicas != nullptr) {
      const double r = unit.groups().replicas->size();
      total += reductions * 2 * (r - 1) / r * message / p;
    }
  }
  return steps * (total + 2 * (p - 1) / p * 8);
}

MemoryBill predicted_memory(const FullyShardedDataParallel& fsdp,
                            const StepPlan& plan, double beside) {
  MemoryBill bill;
  Walk walk(fsdp, plan, beside);
  // The second step may prefetch, and nothing changes after it
  for (std::int64_t k = 0; k < std::min<std::int64_t>(plan.steps, 2); ++k) {
    for (std::int64_t i = 0; i < plan.micro_steps; ++i) {
      const bool is_last = i + 1 == plan.micro_steps;
      walk.micro_step(k == 0 && i == 0, is_last, is_last || !plan.no_sync);
    }
    walk.update();
  }
  bill[MemoryKind::kParameter] = walk.parameters.peak;
  bill[MemoryKind::kGradient] = walk.gradients.peak;
  bill[MemoryKind::kCommunication] = walk.messages.peak;
  return bill;
}

}  // namespace shardbook::fsdp
