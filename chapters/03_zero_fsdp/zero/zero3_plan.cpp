// Which parameters are fetched together, and at which cost.

#include <algorithm>
#include <unordered_map>

#include "chapters/03_zero_fsdp/zero/zero3.h"

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
