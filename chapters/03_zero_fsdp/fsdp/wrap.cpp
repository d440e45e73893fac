#include "chapters/03_zero_fsdp/fsdp/wrap.h"

#include <algorithm>

namespace shardbook::fsdp {
namespace {

/// The direct children of `module`.
std::vector<Module*> children_of(Module& module) {
  class Children : public MemberVisitor {
   public:
    void parameter(const std::string&, Tensor&) override {}
    void buffer(const std::string&, Tensor&) override {}
    void module(const std::string&, Module& child) override {
      found.push_back(&child);
    }
    std::vector<Module*> found;
  } children;
  module.members(children);
  return children.found;
}

/// Returns the elements of `module` that belong to units in it or below it.
std::int64_t wrap_below(Module& module, bool is_root, const WrapPolicy& policy,
                        const WrapPlan& plan, std::vector<Module*>& units) {
  const std::int64_t numel = module.num_parameters();
  if (!is_root && plan.contains(&module)) return numel;
  if (!policy(module, /*recurse=*/true, numel)) return 0;

  // Children go into a separate list: their parents come before them
  std::vector<Module*> below;
  std::int64_t wrapped = 0;
  for (Module* child : children_of(module)) {
    wrapped += wrap_below(*child, /*is_root=*/false, policy, plan, below);
  }
  const bool wraps =
      !is_root && policy(module, /*recurse=*/false, numel - wrapped);
  if (wraps) units.push_back(&module);
  units.insert(units.end(), below.begin(), below.end());
  return wraps ? numel : wrapped;
}

}  // namespace

WrapPolicy size_based_auto_wrap_policy(std::int64_t min_num_params,
                                       std::set<std::string> force_leaf,
                                       std::set<std::string> exclude) {
  return [=](Module& module, bool recurse, std::int64_t numel) {
    const auto& types = recurse ? force_leaf : exclude;
    return numel >= min_num_params && types.count(module.type_name()) == 0;
  };
}

WrapPolicy transformer_auto_wrap_policy(std::set<std::string> types) {
  return
      [types = std::move(types)](Module& module, bool recurse, std::int64_t) {
        return recurse || types.count(module.type_name()) > 0;
      };
}

bool WrapPlan::contains(const Module* module) const {
  return std::any_of(units_.begin(), units_.end(),
                     [&](const PlannedUnit& u) { return u.module == module; });
}

EnableWrap::EnableWrap(WrapPlan& plan,
                       const std::optional<UnitOptions>& defaults)
    : plan_(plan), previous_(plan) {
  plan.is_enabled_ = true;
  plan.defaults_ = defaults;
}

EnableWrap::~EnableWrap() {
  plan_.is_enabled_ = previous_.is_enabled_;
  plan_.defaults_ = previous_.defaults_;
}

Module& wrap(WrapPlan& plan, Module& module,
             const std::optional<UnitOptions>& options) {
  if (plan.is_enabled_ && !plan.contains(&module)) {
    plan.units_.push_back({&module, options ? options : plan.defaults_});
  }
  return module;
}

std::vector<Module*> auto_wrap(Module& root, const WrapPolicy& policy,
                               const WrapPlan& plan) {
  std::vector<Module*> units;
  if (policy) wrap_below(root, /*is_root=*/true, policy, plan, units);
  return units;
}

}  // namespace shardbook::fsdp
