#include "chapters/03_zero_fsdp/zero/zero3.h"

#include <algorithm>
#include <unordered_map>

#include "comm/coalesce.h"
#include "core/check.h"
#include "core/context.h"
#include "core/tensor_storage.h"

namespace shardbook::zero {
namespace {

/// A module's own parameters, without its submodules'.
class OwnParameters : public MemberVisitor {
 public:
  explicit OwnParameters(Module& module) { module.members(*this); }
  void parameter(const std::string&, Tensor& tensor) override {
    if (tensor.defined()) tensors.push_back(tensor);
  }
  void buffer(const std::string&, Tensor&) override {}
  void module(const std::string&, Module&) override {}
  Tensors tensors;
};

bool is_below(const std::string& name, const std::string& parent) {
  return name.compare(0, parent.size() + 1, parent + ".") == 0;
}

}  // namespace

std::vector<UnitPlan> plan_units(Module& module,
                                 const std::vector<std::string>& unit_types) {
  const std::vector<NamedModule> modules = module.named_modules();
  auto is_unit_type = [&](const NamedModule& entry) {
    return std::count(unit_types.begin(), unit_types.end(),
                      entry.module->type_name()) > 0;
  };
  const bool has_types =
      std::any_of(modules.begin(), modules.end(), is_unit_type);

  // Candidates: modules of the types, or all that have parameters; the root
  // takes what remains
  std::vector<UnitPlan> units;
  std::unordered_map<const void*, std::vector<std::size_t>> users;
  for (const NamedModule& entry : modules) {
    const bool is_root = entry.module == &module;
    const bool is_inside = !units.empty() && !units.back().name.empty() &&
                           is_below(entry.name, units.back().name) && has_types;
    if (is_inside || (!is_root && has_types && !is_unit_type(entry))) continue;
    Tensors own;
    if (!has_types) {
      own = OwnParameters(*entry.module).tensors;
    } else if (!is_root) {
      own = entry.module->parameters();
    }
    for (const Tensor& tensor : own) users[tensor.id()].push_back(units.size());
    units.push_back({entry.name, entry.module, {}});
  }

  // A parameter of two units is the root's, whose forward is always running
  for (const NamedTensor& entry : module.named_parameters()) {
    const auto found = users.find(entry.tensor.id());
    const bool is_shared = found == users.end() || found->second.size() != 1;
    units[is_shared ? 0 : found->second[0]].parameters.push_back(entry);
  }
  units.erase(std::remove_if(
                  units.begin(), units.end(),
                  [](const UnitPlan& unit) { return unit.parameters.empty(); }),
              units.end());
  return units;
}

// --- Construction ------------------------------------------------------------

ZeroStage3::ZeroStage3(Module& module, ProcessGroup& group,
                       const ZeroOptions& options)
    : ZeroOptimizer(module, group, options),
      self_(std::make_shared<ZeroStage3*>(this)) {
  move_to_host(module.named_parameters());
  make_groups();
  make_units();
  for (auto& unit : units_) {
    for (Slot& slot : unit->slots) partition(slot);
  }
  broadcast_coalesced(group, module.buffers(), 0, "buffers");
  add_hooks();
}

ZeroStage3::~ZeroStage3() {
  *self_ = nullptr;
  for (auto& unit : units_) {
    for (Slot& slot : unit->slots) {
      if (slot.is_trained) slot.parameter.remove_accumulate_hook(slot.hook_key);
    }
  }
}

void ZeroStage3::make_groups() {
  groups_ = group_parameters(/*with_frozen=*/true);
  RankContext& context = RankContext::current();
  for (ShardGroup& group : groups_) {
    // Every parameter is cut alone, flattened: rank r keeps slice r of each
    std::vector<Shape> flattened;
    for (const NamedTensor& each : group.parameters) {
      flattened.push_back({each.tensor.numel()});
    }
    group.layout = row_layout(flattened, group_.size());

    // The updated shard, and the gathered one
    const DType dtype = group.parameters[0].tensor.dtype();
    const Shape shape{group.layout.shard_numel};
    const bool on_host = group.is_trained ? options_.offload_optimizer
                                          : options_.offload_parameters;
    const Device& home = on_host ? context.host() : context.device;
    {
      MemoryScope kind(MemoryKind::kParameter);
      group.shard = Tensor::zeros(shape, {dtype, home});
      const bool needs_copy = on_host && !options_.offload_parameters;
      if (needs_copy) {
        group.on_device = Tensor::zeros(shape, {dtype, context.device});
      }
      gather_shards_.push_back(needs_copy ? group.on_device : group.shard);
    }
    if (!group.is_trained) continue;
    MemoryScope kind(MemoryKind::kGradient);
    group.grad = Tensor::zeros(shape, {shard_dtype(dtype), home});
  }
}

void ZeroStage3::make_units() {
  // The group of each parameter, and its place there
  std::unordered_map<const void*, std::pair<std::size_t, std::size_t>> places;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < groups_[g].parameters.size(); ++i) {
      places[groups_[g].parameters[i].tensor.id()] = {g, i};
    }
  }

  // One unit per module and dtype
  for (const UnitPlan& plan : plan_units(module_, options_.unit_types)) {
    const std::size_t first = units_.size();
    for (const NamedTensor& entry : plan.parameters) {
      auto found = std::find_if(
          units_.begin() + static_cast<std::ptrdiff_t>(first), units_.end(),
          [&](auto& unit) { return unit->dtype == entry.tensor.dtype(); });
      if (found == units_.end()) {
        units_.push_back(std::make_unique<Unit>());
        found = std::prev(units_.end());
        (*found)->index = units_.size() - 1;
        (*found)->name = plan.name;
        (*found)->module = plan.module;
        (*found)->dtype = entry.tensor.dtype();
      }
      Unit& unit = **found;
      const auto [g, i] = places.at(entry.tensor.id());
      Slot& slot = unit.slots.emplace_back();
      slot.parameter = entry.tensor;
      slot.group = g;
      slot.offset = groups_[g].layout.offsets[i] / group_.size();
      slot.slice = groups_[g].layout.chunk[i];
      slot.is_trained = groups_[g].is_trained;
      slot.is_persistent =
          entry.tensor.numel() <= options_.persistence_threshold;
      if (!slot.is_persistent) unit.numel += slot.slice * group_.size();
      if (!slot.is_trained) continue;
      slot.bucket_offset = unit.bucket_slice;
      unit.bucket_slice += slot.slice;
    }
  }
  fetches_ = std::make_unique<Fetches>(
      unit_numels(), options_,
      Fetches::Effects{[this](auto u) { start_gather(*units_[u]); },
                       [this](auto u) { finish_gather(*units_[u]); },
                       [this](auto u) { release(*units_[u]); }});
}

// Cuts rank 0's values into slices; the parameter becomes a view of memory that
// is allocated per fetch.
void ZeroStage3::partition(Slot& slot) {
  const std::int64_t d = group_.size(), n = slot.parameter.numel();
  MemoryScope kind(MemoryKind::kParameter);
  slot.full = Tensor::empty({d * slot.slice}, {slot.parameter.dtype(),
                                               RankContext::current().device});
  const Tensor view = slot.full.flat_view(0, slot.parameter.shape());
  view.copy_from(slot.parameter);
  slot.full.flat_view(n, {d * slot.slice - n}).zero();
  group_.broadcast(view, 0, "parameters").wait();
  const Tensor own =
      slot.full.flat_view(group_.rank() * slot.slice, {slot.slice});
  const Tensor& kept = groups_[slot.group].shard;
  const Tensor& gathered = gather_shards_[slot.group];
  copy_across(kept.flat_view(slot.offset, {slot.slice}), own, host_traffic_);
  if (!gathered.is_same(kept)) {
    gathered.flat_view(slot.offset, {slot.slice}).copy_from(own);
  }
  set_data(slot.parameter, view);
  if (!slot.is_persistent) release_storage(slot.full);
}

void ZeroStage3::add_hooks() {
  const std::shared_ptr<ZeroStage3*> self = self_;
  module_.add_forward_pre_hook([self](Module&, Tensors&) {
    if (*self != nullptr) (*self)->begin_forward();
  });
  for (auto& owned : units_) {
    Unit* unit = owned.get();
    unit->module->add_forward_pre_hook([self, unit](Module&, Tensors&) {
      if (*self != nullptr) (*self)->fetches_->fetch(unit->index);
    });
    unit->module->add_forward_hook([self, unit](Module&, Tensors& outputs) {
      if (*self != nullptr) (*self)->after_forward(*unit, outputs);
    });
    for (Slot& slot : unit->slots) {
      if (!slot.is_trained) continue;
      slot.hook_key = slot.parameter.add_accumulate_hook(
          [this, unit, &slot](Tensor&) { on_gradient(*unit, slot); });
    }
  }
}

// --- The step ----------------------------------------------------------------

void ZeroStage3::finish_gradients() {
  SB_CHECK(num_accumulated_ > 0,
           "zero: step without a gradient; run a backward before");
  fetches_->release_all();  // a forward without a backward leaves units whole
  // Zero the gradients of units that no backward has reached
  for (auto& unit : units_) {
    if (unit->num_reduced > 0) continue;
    for (const Slot& slot : unit->slots) {
      if (!slot.is_trained) continue;
      groups_[slot.group].grad.flat_view(slot.offset, {slot.slice}).zero();
    }
  }
}

void ZeroStage3::publish(bool with_frozen) {
  fetches_->release_all();  // of a forward before a load
  // Small parameters stay gathered
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    if (!groups_[i].is_trained && !with_frozen) continue;
    std::vector<Slot*> slots;
    for (auto& unit : units_) {
      for (Slot& slot : unit->slots) {
        if (slot.group == i && slot.is_persistent) slots.push_back(&slot);
      }
    }
    if (slots.empty()) continue;
    Tensor buffer;
    gather(slots, buffer, "persistent").wait();
    unpack(slots, buffer);
  }
  updated_.record();
}

void ZeroStage3::clear_gradients() {
  for (auto& unit : units_) {
    unit->num_reduced = 0;
    // Drop the remains of a failed backward
    unit->reduction.wait();
    unit->bucket = unit->sent = Tensor();
    for (Slot& slot : unit->slots) slot.parameter.clear_grad();
  }
  reducing_ = nullptr;
  num_accumulated_ = 0;
}

// --- The bill ----------------------------------------------------------------

double ZeroStage3::full_bytes(const Unit& unit) const {
  return static_cast<double>(unit.numel) * dtype_bytes(unit.dtype);
}

double ZeroStage3::reduced_bytes(const Unit& unit) const {
  return static_cast<double>(unit.bucket_slice * group_.size() *
                             wire_bytes(unit.dtype));
}

double ZeroStage3::persistent_bytes(bool with_frozen) const {
  double bytes = 0;
  for (const auto& unit : units_) {
    for (const Slot& slot : unit->slots) {
      if (!slot.is_persistent || !(slot.is_trained || with_frozen)) continue;
      bytes += static_cast<double>(slot.full.bytes());
    }
  }
  return bytes;
}

double ZeroStage3::predicted_bytes(std::int64_t steps,
                                   std::int64_t micro_steps) const {
  const double d = group_.size();
  double once = 0, micro_step = 0;
  double step = 2 * 8 + persistent_bytes(/*with_frozen=*/false);  // and a norm
  for (const Tensor& buffer : module_.buffers()) {
    once += static_cast<double>(buffer.bytes());
  }
  for (const Tensor& parameter : module_.parameters()) {
    once += static_cast<double>(parameter.bytes());
  }
  // Units are gathered for forward and for backward; those that were kept only
  // once, as soon as the first micro-step has recorded the order
  double kept = 0;
  const std::vector<int> gathers = later_gathers();
  for (const auto& unit : units_) {
    micro_step += 2 * full_bytes(*unit) + reduced_bytes(*unit);
    kept += (2 - gathers[unit->index]) * full_bytes(*unit);
  }
  step += static_cast<double>(micro_steps) * micro_step;
  const double later =
      std::max<double>(static_cast<double>(steps * micro_steps) - 1, 0);
  return (d - 1) / d *
         (once + static_cast<double>(steps) * step - later * kept);
}

std::vector<std::int64_t> ZeroStage3::unit_numels() const {
  std::vector<std::int64_t> numels;
  for (const auto& unit : units_) numels.push_back(unit->numel);
  return numels;
}

// Every unit runs once in forward and once in backward, inside the root if
// there is one.
std::vector<int> ZeroStage3::later_gathers() const {
  std::vector<int> gathers(units_.size());
  const auto nothing = [](std::size_t) {};
  Fetches fetches(unit_numels(), options_,
                  {[&](std::size_t u) { gathers[u] += 1; }, nothing, nothing});
  std::vector<std::size_t> roots, others;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const bool is_root = units_[u]->module == &module_ && units_.size() > 1;
    (is_root ? roots : others).push_back(u);
  }
  const auto use = [&](std::size_t u) {
    fetches.fetch(u);
    fetches.end_use(u, /*may_keep=*/true);
  };
  // The first micro-step records the order
  for (int i = 0; i < 2; ++i) {
    std::fill(gathers.begin(), gathers.end(), 0);
    fetches.begin_forward();
    for (const std::size_t root : roots) fetches.fetch(root);
    std::for_each(others.begin(), others.end(), use);
    for (const std::size_t root : roots) fetches.end_use(root, true);
    for (const std::size_t root : roots) fetches.fetch(root);
    std::for_each(others.rbegin(), others.rend(), use);
    fetches.end_micro_step();
  }
  return gathers;
}

}  // namespace shardbook::zero
