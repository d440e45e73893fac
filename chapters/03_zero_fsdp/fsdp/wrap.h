#pragma once

// Which modules become units. The root always does; policies choose the rest.
//
//   auto policy = size_based_auto_wrap_policy(1'000'000);
//   std::vector<Module*> units = auto_wrap(model, policy);
//
// or by hand, bottom-up, as torch.distributed.fsdp.wrap:
//
//   WrapPlan plan;
//   {
//     EnableWrap scope(plan, {/* options of every wrap inside */});
//     wrap(plan, model.h[0]);
//     wrap(plan, model.h[1], own_options);     // these win over the scope's
//   }
//   wrap(plan, *model.ln_f);                   // outside the scope: nothing
//
// A unit is gathered for its own forward and backward and freed between. So a
// parameter that is used outside its module's forward (GPT's tied head) must
// belong to an outer unit, and tied parameters must lie in one.

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/module.h"

namespace shardbook::fsdp {

/// With `recurse`: whether to visit this module's children. Otherwise: whether
/// the module, with `numel` elements not yet wrapped, becomes a unit.
using WrapPolicy =
    std::function<bool(Module& module, bool recurse, std::int64_t numel)>;

/// Units of at least `min_num_params` elements. Does not go into modules of the
/// types `force_leaf`, and never wraps modules of `exclude`. (Earlier names:
/// default_auto_wrap_policy, given as fsdp_auto_wrap_policy.)
WrapPolicy size_based_auto_wrap_policy(
    std::int64_t min_num_params = 100'000'000,
    std::set<std::string> force_leaf = {"GptAttention"},
    std::set<std::string> exclude = {"ModuleList", "ModuleDict"});

/// Every module of these types: a transformer's blocks.
WrapPolicy transformer_auto_wrap_policy(std::set<std::string> types);

/// Mixed precision: 16 bits for messages and computation, f32 for shards. Absent:
/// the dtype of the parameters, which the shard, its gradient and the optimizer's
/// state always keep.
struct MixedPrecision {
  /// Forward and backward compute in it. Shards are cast before the gather, and
  /// fewer bytes travel.
  std::optional<DType> param_dtype = {};
  /// The reduce-scatter; absent: param_dtype.
  std::optional<DType> reduce_dtype = {};
  /// Buffers, such as running statistics. BatchNorm keeps its own.
  std::optional<DType> buffer_dtype = {};
};

/// The options that a wrap may set for one unit.
struct UnitOptions {
  bool offload_params = false;
  MixedPrecision mixed_precision;
};

struct PlannedUnit {
  Module* module = nullptr;
  std::optional<UnitOptions> options;
};

/// Units chosen by hand. Modules must not move afterwards: wrap the members of
/// the finished model.
class WrapPlan {
 public:
  const std::vector<PlannedUnit>& units() const { return units_; }
  bool contains(const Module* module) const;

 private:
  friend class EnableWrap;
  friend Module& wrap(WrapPlan&, Module&, const std::optional<UnitOptions>&);
  std::vector<PlannedUnit> units_;
  bool is_enabled_ = false;
  std::optional<UnitOptions> defaults_;
};

/// The scope in which `wrap` wraps.
class [[nodiscard]] EnableWrap {
 public:
  explicit EnableWrap(WrapPlan& plan,
                      const std::optional<UnitOptions>& defaults = {});
  ~EnableWrap();
  EnableWrap(const EnableWrap&) = delete;
  EnableWrap& operator=(const EnableWrap&) = delete;

 private:
  WrapPlan& plan_;
  WrapPlan previous_;
};

/// Makes `module` a unit inside the scope of EnableWrap; does nothing outside.
Module& wrap(WrapPlan& plan, Module& module,
             const std::optional<UnitOptions>& options = {});

/// The units below `root` (itself left out), parents before children. The
/// policy decides on children first, then on a parent with its remaining
/// elements. Modules in `plan` are units already.
std::vector<Module*> auto_wrap(Module& root, const WrapPolicy& policy,
                               const WrapPlan& plan = {});

}  // namespace shardbook::fsdp
