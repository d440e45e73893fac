#include "chapters/03_zero_fsdp/fsdp_bill.h"

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

/// The events of fsdp.cpp and flat_parameter.cpp, on bytes instead of tensors.
class Walk {
 public:
  Walk(const FullyShardedDataParallel& fsdp, double beside)
      : options_(fsdp.options()),
        units_(fsdp.units()),
        state_(units_.size()),
        has_shard_grad_(units_.size()),
        has_grads_(units_.size()),
        beside_(beside) {
    for (const FlatParameter* unit : units_) {
      if (!unit->is_on_host()) {
        parameters.add(static_cast<double>(unit->shard_bytes()));
      }
      // Taken once when the unit is made, and given back
      parameters.add(static_cast<double>(unit->full_bytes()));
      parameters.add(-static_cast<double>(unit->full_bytes()));
    }
  }

  void micro_step(bool is_first, bool is_last, bool reduces) {
    // Forward: the root stays
    gather(0, is_first ? units_.size() : 1);
    for (std::size_t i = 1; i < units_.size(); ++i) {
      gather(i, is_first ? units_.size() : i + 1);
      if (is_zero3(options_)) free(i);
    }
    // Backward, the root first and last
    if (is_last) messages.add(beside_);
    prepare(0);
    for (std::size_t i = units_.size(); i-- > 1;) {
      start(i);
      if (options_.backward_prefetch == BackwardPrefetch::kPre) start(i - 1);
      finish(i);
      prepare(i);
      free(i);
      if (options_.backward_prefetch == BackwardPrefetch::kPost) start(i - 1);
      if (reduces) reduce(i);
    }
    if (reduces) reduce(0);
    for (std::size_t i = 0; i < units_.size(); ++i) free(i);
    finish_reduction();
    if (is_last) messages.add(-beside_);
  }

  void update() {
    messages.add(8);  // the norm
    messages.add(-8);
    for (std::size_t i = 0; i < units_.size(); ++i) {
      if (has_shard_grad_[i]) gradients.add(-shard_grad(i));
      has_shard_grad_[i] = false;
    }
  }

  Level parameters, gradients, messages;

 private:
  enum class State { kSharded, kGathering, kFull };

  double bytes(std::int64_t n) const { return static_cast<double>(n); }
  double shard_grad(std::size_t i) const {
    return units_[i]->is_on_host() ? 0 : bytes(units_[i]->shard_grad_bytes());
  }

  void gather(std::size_t i, std::size_t next) {
    start(i);
    if (options_.forward_prefetch && next < units_.size()) start(next);
    finish(i);
  }
  void start(std::size_t i) {
    if (state_[i] != State::kSharded || units_[i]->full_bytes() == 0) return;
    state_[i] = State::kGathering;
    messages.add(bytes(units_[i]->staging_bytes()));
    if (units_[i]->staging_bytes() == 0) {
      parameters.add(bytes(units_[i]->full_bytes()));
    }
  }
  void finish(std::size_t i) {
    if (state_[i] != State::kGathering) return;
    state_[i] = State::kFull;
    if (units_[i]->staging_bytes() == 0) return;
    parameters.add(bytes(units_[i]->full_bytes()));
    messages.add(-bytes(units_[i]->staging_bytes()));
  }
  void free(std::size_t i) {
    finish(i);
    if (state_[i] != State::kFull) return;
    state_[i] = State::kSharded;
    parameters.add(-bytes(units_[i]->full_bytes()));
  }

  void prepare(std::size_t i) {
    if (!has_grads_[i]) gradients.add(bytes(units_[i]->grads_bytes()));
    has_grads_[i] = true;
  }
  void reduce(std::size_t i) {
    finish_reduction();
    const FlatParameter& unit = *units_[i];
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
    const FlatParameter& unit = *units_[reducing_];
    const bool is_first = !has_shard_grad_[reducing_];
    has_shard_grad_[reducing_] = true;
    // The arrived sum: of its own, or (without a shard group) the message
    Level& home = unit.sends_copy() ? messages : gradients;
    const double message = unit.sends_copy() ? bytes(unit.message_bytes())
                                             : bytes(unit.grads_bytes());
    Level& arrived = unit.ranks() == 1 ? home
                     : unit.output_is_grad() ? gradients : messages;
    const double sum =
        unit.ranks() == 1 ? message : bytes(unit.output_bytes());
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
  const std::vector<const FlatParameter*> units_;
  std::vector<State> state_;
  std::vector<bool> has_shard_grad_, has_grads_;
  const double beside_;
  bool is_reducing_ = false;
  std::size_t reducing_ = 0;
};

bool has_unit_in_unit(const std::vector<const FlatParameter*>& units) {
  for (std::size_t i = 1; i < units.size(); ++i) {
    for (std::size_t j = 1; j < units.size(); ++j) {
      if (units[j]->name().rfind(units[i]->name() + ".", 0) == 0) return true;
    }
  }
  return false;
}

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
    const double gathers =
        unit.ranks() == 1 ? 0 : is_zero3(fsdp.options()) && i > 0 ? 2 : 1;
    total += micro * gathers * (p - 1) / p *
             static_cast<double>(unit.full_bytes());
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
  if (has_unit_in_unit(fsdp.units())) return bill;
  Walk walk(fsdp, beside);
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
