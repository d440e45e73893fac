#include "chapters/11_dtensor/parallelize.h"

#include <algorithm>
#include <map>

#include "chapters/common/models/models.h"
#include "core/check.h"
#include "core/context.h"
#include "core/layers.h"
#include "core/shards.h"

namespace shardbook::dtensor {
using Kind = Style::Kind;

Style colwise(std::vector<Columns> columns) {
  return {.kind = Kind::kColwise, .columns = std::move(columns)};
}
Style rowwise() { return {.kind = Kind::kRowwise}; }
Style pairwise() { return {.kind = Kind::kPairwise}; }
Style pairwise_sequence() { return {.kind = Kind::kPairwiseSequence}; }
Style sequence(std::int64_t dim) {
  return {.kind = Kind::kSequence, .sequence_dim = dim};
}

namespace {

std::vector<std::string> components(const std::string& path) {
  std::vector<std::string> parts(1);
  for (const char c : path) {
    if (c == '.') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

bool matches(const std::string& pattern, const std::string& name) {
  const auto a = components(pattern), b = components(name);
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] != "*" && a[i] != b[i]) return false;
  }
  return true;
}

std::string join(const std::string& prefix, const std::string& name) {
  if (prefix.empty() || name.empty()) return prefix + name;
  return prefix + "." + name;
}

bool is_pairwise(const Style& style) {
  return style.kind == Kind::kPairwise || style.kind == Kind::kPairwiseSequence;
}

// Column, row, column, row: the first style converts the module's input, the
// last one its output.
Plan pairs_of(const std::string& name, Module& module, const Style& style) {
  Plan plan;
  for (const NamedModule& below : module.named_modules()) {
    if (dynamic_cast<Linear*>(below.module) == nullptr) continue;
    const bool is_column = plan.size() % 2 == 0;
    plan.emplace_back(join(name, below.name),
                      is_column ? colwise() : rowwise());
  }
  SB_CHECK(!plan.empty() && plan.size() % 2 == 0, "parallelize_module: '", name,
           "' (", module.type_name(), ") has ", plan.size(),
           " Linear layers; pairwise styles need an even number, or name the "
           "layers one by one");
  if (const auto* attention = dynamic_cast<GptAttention*>(&module)) {
    plan.front().second.columns = attention->block().qkv.columns;
  } else if (const auto* mlp = dynamic_cast<GptMlp*>(&module)) {
    plan.front().second.columns = mlp->block().up.columns;
  }
  if (style.kind == Kind::kPairwiseSequence) {
    plan.front().second.input = shard(0);
    plan.back().second.output = shard(0);
  }
  if (style.input) plan.front().second.input = style.input;
  if (style.output) plan.back().second.output = style.output;
  if (const auto* attention = dynamic_cast<GptAttention*>(&module)) {
    for (const BlockPart& norm : attention->block().head_norms) {
      plan.emplace_back(join(name, norm.leaf()), sequence());
    }
  }
  return plan;
}

/// Counts the members of a module tree that are each tensor, and replaces them.
class Members : public MemberVisitor {
 public:
  explicit Members(Module& root) { root.members(*this); }
  void parameter(const std::string&, Tensor& tensor) override {
    if (tensor.defined()) members_[tensor.id()].push_back(&tensor);
  }
  void buffer(const std::string&, Tensor&) override {}
  void module(const std::string&, Module& child) override {
    child.members(*this);
  }
  const std::vector<Tensor*>& of(const Tensor& tensor) const {
    return members_.at(tensor.id());
  }

 private:
  std::map<const void*, std::vector<Tensor*>> members_;
};

/// The part of a parameter that a rank holds; packed columns are cut block by block.
Shards part_of(const CutParameter& cut, const Mesh& mesh) {
  if (cut.placement.is_replicate()) return {};
  const std::int64_t dim = cut.placement.dim;
  const std::int64_t rank = mesh.coordinate()[0], ranks = mesh.shape()[0];
  if (!cut.columns.empty()) return {cut_columns(dim, rank, ranks, cut.columns)};
  return {{dim, rank, ranks, 1, cut.shape[static_cast<std::size_t>(dim)]}};
}

/// Puts this rank's block in the place of `whole`, wherever the tree holds it.
void replace_by_part(const Members& members, const Tensor& whole,
                     const Mesh& mesh, const CutParameter& cut,
                     const char* function) {
  const std::vector<Tensor*>& holders = members.of(whole);
  // `whole` is one more handle
  SB_CHECK(whole.impl_ptr().use_count() ==
               static_cast<std::int64_t>(holders.size()) + 1,
           function, ": parameter '", cut.name,
           "' is replaced, and is also held outside the model; create the "
           "optimizer after ",
           function, ", or it trains a tensor that no module uses");
  const MemoryScope kind(MemoryKind::kParameter);
  Tensor local = take_part(whole.detach(), part_of(cut, mesh));
  local.set_requires_grad(whole.requires_grad());
  for (Tensor* holder : holders) *holder = local;
}

Tensor whole_of(const Tensor& local, const Mesh& mesh,
                const CutParameter& cut) {
  const NoGrad no_grad;
  const Tensor whole = Tensor::zeros(cut.shape, local.options());
  put_part(whole, local.detach(), part_of(cut, mesh));
  mesh.group(0).all_reduce(whole).wait();
  return whole;
}

/// The plan with pairwise styles resolved into colwise and rowwise: one entry per
/// module, by its full name.
Plan resolve(Module& root, const Plan& plan) {
  Plan resolved;
  const auto modules = root.named_modules();
  for (const auto& [pattern, style] : plan) {
    bool found = false;
    for (const NamedModule& each : modules) {
      if (!matches(pattern, each.name)) continue;
      found = true;
      if (is_pairwise(style)) {
        const Plan pairs = pairs_of(each.name, *each.module, style);
        resolved.insert(resolved.end(), pairs.begin(), pairs.end());
      } else {
        resolved.emplace_back(each.name, style);
      }
    }
    SB_CHECK(found, "parallelize_module: the plan names '", pattern,
             "', and no module has that name");
  }
  return resolved;
}

/// How a style cuts the parameters of one module.
std::vector<CutParameter> cuts_of(const std::string& name, Module& module,
                                  const Style& style) {
  const std::string prefix = name.empty() ? "" : name + ".";
  const bool is_column = style.kind == Kind::kColwise;
  if (auto* linear = dynamic_cast<Linear*>(&module);
      linear != nullptr && style.kind != Kind::kSequence) {
    std::vector<CutParameter> cuts = {{prefix + "weight",
                                       is_column ? shard(1) : shard(0),
                                       style.columns, linear->weight.shape()}};
    if (linear->bias.defined()) {
      cuts.push_back({prefix + "bias", is_column ? shard(0) : replicate(),
                      style.columns, linear->bias.shape()});
    }
    return cuts;
  }
  if (auto* table = dynamic_cast<Embedding*>(&module);
      table != nullptr && style.kind != Kind::kSequence) {
    return {{prefix + "weight",
             is_column ? shard(1) : shard(0),
             {},
             table->weight.shape()}};
  }
  const bool is_on_tokens = dynamic_cast<LayerNorm*>(&module) != nullptr ||
                            dynamic_cast<RmsNorm*>(&module) != nullptr ||
                            dynamic_cast<Dropout*>(&module) != nullptr;
  SB_CHECK(style.kind == Kind::kSequence && is_on_tokens,
           "parallelize_module: '", name, "' is a ", module.type_name(),
           "; colwise and rowwise are for Linear and Embedding, sequence for "
           "LayerNorm, RmsNorm and Dropout");
  std::vector<CutParameter> cuts;
  for (const NamedTensor& each : module.named_parameters()) {
    cuts.push_back({prefix + each.name, replicate(), {}, each.tensor.shape()});
  }
  return cuts;
}

}  // namespace

std::vector<CutParameter> parallelize_module(Module& root, const Mesh& mesh,
                                             const Plan& plan) {
  SB_CHECK(mesh.ndim() == 1, "parallelize_module over ", mesh.text(),
           ": name one axis of the mesh");
  const std::int64_t ranks = mesh.shape()[0];
  std::map<std::string, Module*> modules;
  for (const NamedModule& each : root.named_modules()) {
    modules[each.name] = each.module;
    if (auto* attention = dynamic_cast<GptAttention*>(each.module)) {
      const bool is_cut =
          std::any_of(plan.begin(), plan.end(), [&each](const auto& entry) {
            return is_pairwise(entry.second) && matches(entry.first, each.name);
          });
      if (!is_cut) continue;
      const auto share = [&](std::int64_t& heads, const char* what) {
        SB_CHECK(heads % ranks == 0, "parallelize_module: '", each.name,
                 "' has ", heads, what, " for ", mesh.text(),
                 "; give a number of ranks that divides them");
        heads /= ranks;
      };
      share(attention->heads, " heads");
      share(attention->kv_heads, " heads of keys");
      attention->first_head = attention->heads * mesh.coordinate()[0];
    }
  }

  std::vector<CutParameter> all;
  for (const auto& [name, style] : resolve(root, plan)) {
    Module& module = *modules.at(name);
    const Members members(root);
    std::int64_t in = 0, out = 0;
    for (const CutParameter& cut : cuts_of(name, module, style)) {
      all.push_back(cut);
      if (cut.shape.size() == 2) {
        in = cut.shape[0];
        out = cut.shape[1];
      }
      if (cut.placement.is_replicate()) continue;
      const std::string last = components(cut.name).back();
      Tensor whole;
      for (const NamedTensor& each : module.named_parameters()) {
        if (each.name == last) whole = each.tensor;
      }
      replace_by_part(members, whole, mesh, cut, "parallelize_module");
    }
    add_layout_hooks(module, mesh, style, in, out);
  }
  return all;
}

std::vector<CutParameter> distribute_module(Module& root, const Mesh& mesh,
                                            const Partition& partition,
                                            const LayoutChange& input,
                                            const LayoutChange& output) {
  SB_CHECK(mesh.ndim() == 1, "distribute_module over ", mesh.text(),
           ": name one axis of the mesh");
  std::vector<CutParameter> all;
  for (const NamedTensor& each : root.named_parameters()) {
    all.push_back({each.name,
                   partition ? partition(each.name) : replicate(),
                   {},
                   each.tensor.shape()});
  }
  const Members members(root);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].placement.is_replicate()) continue;
    const Tensor whole = root.named_parameters()[i].tensor;
    replace_by_part(members, whole, mesh, all[i], "distribute_module");
  }
  if (input) {
    root.add_forward_pre_hook([mesh, input](Module&, Tensors& x) {
      for (Tensor& each : x) each = input(each, mesh);
    });
  }
  if (output) {
    root.add_forward_hook([mesh, output](Module&, Tensors& y) {
      for (Tensor& each : y) each = output(each, mesh);
    });
  }
  return all;
}

std::vector<NamedTensor> full_parameters(
    Module& root, const Mesh& mesh, const std::vector<CutParameter>& cuts) {
  std::vector<NamedTensor> whole;
  for (const NamedTensor& each : root.named_parameters()) {
    const auto cut = std::find_if(
        cuts.begin(), cuts.end(),
        [&each](const CutParameter& c) { return c.name == each.name; });
    if (cut == cuts.end() || cut->placement.is_replicate()) {
      whole.push_back(each);
    } else {
      whole.push_back({each.name, whole_of(each.tensor, mesh, *cut)});
    }
  }
  return whole;
}

}  // namespace shardbook::dtensor
