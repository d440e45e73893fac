// Construction: which parameters form which unit, over which ranks.

#include <map>

#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::fsdp {
namespace {

struct Placed {
  NamedTensor parameter;
  const Module* unit;
};

/// Every parameter with the innermost unit that contains it.
class UnitWalk : public MemberVisitor {
 public:
  explicit UnitWalk(const std::map<const Module*, std::string>& units)
      : units_(units) {}

  void parameter(const std::string& name, Tensor& tensor) override {
    if (!tensor.defined()) return;
    const auto seen = place_.find(tensor.id());
    if (seen == place_.end()) {
      place_[tensor.id()] = placed.size();
      placed.push_back({{prefix_ + name, tensor}, unit_});
      return;
    }
    const Placed& first = placed[seen->second];
    SB_CHECK(first.unit == unit_, "fsdp: '", first.parameter.name,
             "' of unit '", units_.at(first.unit), "' and '", prefix_ + name,
             "' of unit '", units_.at(unit_),
             "' are one tensor; tied parameters must lie in one unit: leave "
             "both to the unit around them");
  }
  void buffer(const std::string&, Tensor&) override {}
  void module(const std::string& name, Module& child) override {
    const std::string prefix = prefix_;
    const Module* unit = unit_;
    if (!name.empty()) prefix_ += name + ".";
    if (units_.count(&child) > 0) unit_ = &child;
    child.members(*this);
    prefix_ = prefix;
    unit_ = unit;
  }

  std::vector<Placed> placed;

 private:
  const std::map<const Module*, std::string>& units_;
  std::map<const void*, std::size_t> place_;
  std::string prefix_;
  const Module* unit_ = nullptr;
};

}  // namespace

FullyShardedDataParallel::FullyShardedDataParallel(Module& module,
                                                   ProcessGroup& group,
                                                   const FsdpOptions& options,
                                                   const WrapPlan& plan)
    : module_(module), group_(group), options_(options) {
  make_groups();
  if (options.sync_module_states) broadcast_states();
  convert_buffers();
  make_units(plan);
  divide_before_ = gradient_predivide_factor(group.size());
  divide_after_ = group.size() / divide_before_;
}

FullyShardedDataParallel::~FullyShardedDataParallel() {
  for (const auto& unit : units_) unit->module->clear_hooks();
}

std::unique_ptr<FullyShardedDataParallel> fully_shard(
    Module& root, const std::vector<Module*>& modules, ProcessGroup& group,
    FsdpOptions options) {
  options.per_parameter = true;
  WrapPlan plan;
  {
    EnableWrap scope(plan);
    for (Module* module : modules) wrap(plan, *module);
  }
  return std::make_unique<FullyShardedDataParallel>(root, group, options, plan);
}

void FullyShardedDataParallel::make_groups() {
  const int d = group_.size();
  switch (options_.sharding_strategy) {
    case ShardingStrategy::kFullShard:
    case ShardingStrategy::kShardGradOp:
      if (d > 1) groups_.shards = &group_;
      return;
    case ShardingStrategy::kNoShard:
      if (d > 1) groups_.replicas = &group_;
      return;
    case ShardingStrategy::kHybridShard:
      break;
  }
  // Consecutive ranks (a node) share one copy
  const int f = options_.shard_size;
  SB_CHECK(f >= 1 && d % f == 0, "fsdp: shard_size ", f, " for ", d,
           " ranks; give a divisor of ", d, ", the ranks of a node");
  std::vector<std::vector<int>> nodes(static_cast<std::size_t>(d / f));
  std::vector<std::vector<int>> peers(static_cast<std::size_t>(f));
  for (int rank = 0; rank < d; ++rank) {
    nodes[static_cast<std::size_t>(rank / f)].push_back(rank);
    peers[static_cast<std::size_t>(rank % f)].push_back(rank);
  }
  shard_group_ = group_.partition(nodes, "shards");
  replica_group_ = group_.partition(peers, "replicas");
  if (f > 1) groups_.shards = shard_group_.get();
  if (f < d) groups_.replicas = replica_group_.get();
}

void FullyShardedDataParallel::broadcast_states() {
  for (const Tensor& tensor : module_.parameters()) {
    group_.broadcast(tensor, 0, "parameters").wait();
  }
  for (const Tensor& tensor : module_.buffers()) {
    group_.broadcast(tensor, 0, "buffers").wait();
  }
}

void FullyShardedDataParallel::make_units(const WrapPlan& plan) {
  // The root, units wrapped by hand, units of the policy
  std::map<const Module*, UnitOptions> options;
  const UnitOptions defaults{options_.cpu_offload.offload_params,
                             options_.mixed_precision};
  options[&module_] = defaults;
  for (Module* found : auto_wrap(module_, options_.auto_wrap_policy, plan)) {
    options[found] = defaults;
  }
  for (const PlannedUnit& planned : plan.units()) {
    options[planned.module] = planned.options.value_or(defaults);
  }
  // BatchNorm's statistics need more than few bits
  const bool is_mixed = defaults.mixed_precision.param_dtype.has_value();
  for (const NamedModule& entry : module_.named_modules()) {
    if (is_mixed && entry.module->type_name() == "BatchNorm") {
      options[entry.module] = {defaults.offload_params, MixedPrecision{}};
    }
  }

  // In order of definition
  std::map<const Module*, std::string> names;
  for (const NamedModule& entry : module_.named_modules()) {
    if (options.count(entry.module) == 0) continue;
    names[entry.module] = entry.name.empty() ? "root" : entry.name;
    auto& unit = units_.emplace_back(std::make_unique<Unit>());
    unit->module = entry.module;
    unit->is_root = entry.module == &module_;
    unit->keeps_dtype = is_mixed && entry.module->type_name() == "BatchNorm";
  }
  SB_CHECK(units_.size() == options.size(),
           "fsdp: a module that was wrapped is no part of the ",
           module_.type_name(),
           " given; wrap members of the model where they finally stand");

  // Shard one after another; the model releases its own tensors
  UnitWalk walk(names);
  walk.module("", module_);
  for (const auto& unit : units_) {
    std::vector<NamedTensor> own;
    for (const Placed& placed : walk.placed) {
      if (placed.unit == unit->module) own.push_back(placed.parameter);
    }
    if (!own.empty()) {
      unit->flat = std::make_unique<FlatParameter>(
          names[unit->module], own, groups_, options[unit->module],
          options_.per_parameter, options_.use_orig_params);
    }
    hook(*unit);
  }
  put_leaves_in_place();
}

void FullyShardedDataParallel::put_leaves_in_place() {
  std::map<std::string, Tensor> leaves;
  for (const FlatParameter* unit : units()) {
    for (std::size_t i = 0; i < unit->leaves().size(); ++i) {
      leaves[unit->names()[i]] = unit->leaves()[i];
    }
  }
  module_.replace_tensors([&](const std::string& name, const Tensor& old) {
    const auto leaf = leaves.find(name);
    return leaf == leaves.end() ? old : leaf->second;
  });
}

void FullyShardedDataParallel::convert_buffers() {
  const auto dtype = options_.mixed_precision.buffer_dtype;
  const Device& device = RankContext::current().device;
  std::map<const void*, Tensor> converted;
  const auto convert = [&](const Tensor& buffer, bool casts) {
    if (converted.count(buffer.id()) > 0) return;
    MemoryScope kind(MemoryKind::kParameter);
    Tensor moved = Tensor::empty(buffer.shape(),
                                 {casts ? *dtype : buffer.dtype(), device});
    moved.copy_from(buffer);
    converted[buffer.id()] = moved;
  };
  for (const NamedModule& entry : module_.named_modules()) {
    if (entry.module->type_name() != "BatchNorm") continue;
    for (const Tensor& buffer : entry.module->buffers()) convert(buffer, false);
  }
  for (const Tensor& buffer : module_.buffers()) {
    convert(buffer, dtype && is_floating(buffer.dtype()));
  }
  module_.replace_tensors([&](const std::string&, const Tensor& old) {
    const auto found = converted.find(old.id());
    return found == converted.end() ? old : found->second;
  });
}

SummonFullParams::SummonFullParams(FullyShardedDataParallel& fsdp,
                                   bool writeback)
    : fsdp_(fsdp), writeback_(writeback) {
  SB_CHECK(!fsdp.is_summoned_, "fsdp: summon_full_params inside another one");
  fsdp.reshard_all();
  std::map<const void*, Tensor> whole;
  for (const FlatParameter* unit : fsdp.units()) {
    full_.push_back(unit->gather(unit->shard(), "summon"));
    for (std::size_t i = 0; i < unit->leaves().size(); ++i) {
      whole[unit->leaves()[i].id()] = unit->view(full_.back(), i);
    }
  }
  fsdp.module_.replace_tensors([&](const std::string&, const Tensor& leaf) {
    const auto found = whole.find(leaf.id());
    return found == whole.end() ? leaf : found->second;
  });
  fsdp.is_summoned_ = true;  // last: not if the above throws
}

SummonFullParams::~SummonFullParams() {
  // Write changes back, put the leaves back in place
  fsdp_.is_summoned_ = false;
  const auto units = fsdp_.units();
  for (std::size_t u = 0; u < units.size(); ++u) {
    if (writeback_) units[u]->scatter(full_[u], units[u]->shard());
  }
  fsdp_.put_leaves_in_place();
}

}  // namespace shardbook::fsdp
