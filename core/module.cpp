#include "core/module.h"

#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook {
namespace {

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

/// Walks a module tree and calls back with full paths.
class Walk : public MemberVisitor {
 public:
  using OnTensor = std::function<void(const std::string&, Tensor&, bool)>;
  using OnModule = std::function<void(const std::string&, Module&)>;

  Walk(OnTensor on_tensor, OnModule on_module)
      : on_tensor_(std::move(on_tensor)), on_module_(std::move(on_module)) {}

  void start(Module& root) { module("", root); }
  void parameter(const std::string& name, Tensor& tensor) override {
    visit(name, tensor, true);
  }
  void buffer(const std::string& name, Tensor& tensor) override {
    visit(name, tensor, false);
  }
  void module(const std::string& name, Module& child) override {
    const std::string outer = prefix_;
    prefix_ = join(prefix_, name);
    if (on_module_) on_module_(prefix_, child);
    child.members(*this);
    prefix_ = outer;
  }

 private:
  void visit(const std::string& name, Tensor& tensor, bool is_parameter) {
    if (on_tensor_ && tensor.defined()) {
      on_tensor_(join(prefix_, name), tensor, is_parameter);
    }
  }

  OnTensor on_tensor_;
  OnModule on_module_;
  std::string prefix_;
};

std::vector<NamedTensor> collect(Module& root, bool parameters) {
  std::vector<NamedTensor> found;
  std::unordered_set<const void*> seen;
  Walk(
      [&](const std::string& name, Tensor& tensor, bool is_parameter) {
        if (is_parameter == parameters && seen.insert(tensor.id()).second) {
          found.push_back({name, tensor});
        }
      },
      nullptr)
      .start(root);
  return found;
}

Tensors tensors_of(const std::vector<NamedTensor>& named) {
  Tensors tensors;
  for (const NamedTensor& entry : named) tensors.push_back(entry.tensor);
  return tensors;
}

}  // namespace

Tensor Module::operator()(const Tensor& x) {
  if (pre_hooks_.empty() && post_hooks_.empty()) return forward(x);
  return (*this)(Tensors{x})[0];
}

Tensors Module::operator()(const Tensors& inputs) {
  Tensors tensors = inputs;
  // A hook may add hooks; those run from the next call on.
  const auto before = pre_hooks_;
  for (const ForwardHook& hook : before) hook(*this, tensors);
  Tensors outputs = forward_all(tensors);
  const auto after = post_hooks_;
  for (const ForwardHook& hook : after) hook(*this, outputs);
  return outputs;
}

Tensor Module::forward(const Tensor& x) {
  SB_FAIL(type_name(), ": this module does not take one tensor");
}

Tensors Module::forward_all(const Tensors& inputs) {
  SB_CHECK(inputs.size() == 1, type_name(), ": takes one tensor, given ",
           inputs.size());
  return {forward(inputs[0])};
}

std::vector<NamedTensor> Module::named_parameters() {
  return collect(*this, /*parameters=*/true);
}
Tensors Module::parameters() { return tensors_of(named_parameters()); }
std::vector<NamedTensor> Module::named_buffers() {
  return collect(*this, /*parameters=*/false);
}
Tensors Module::buffers() { return tensors_of(named_buffers()); }

std::vector<NamedModule> Module::named_modules() {
  std::vector<NamedModule> found;
  Walk(nullptr, [&](const std::string& name, Module& module) {
    found.push_back({name, &module});
  }).start(*this);
  return found;
}

std::int64_t Module::num_parameters() {
  std::int64_t numel = 0;
  for (const Tensor& parameter : parameters()) numel += parameter.numel();
  return numel;
}

void Module::replace_tensors(
    const std::function<Tensor(const std::string&, const Tensor&)>& replace) {
  // Keeps the old tensors alive, so that their identities stay distinct.
  std::unordered_map<const void*, std::pair<Tensor, Tensor>> replaced;
  Walk(
      [&](const std::string& name, Tensor& tensor, bool) {
        auto found = replaced.find(tensor.id());
        if (found == replaced.end()) {
          const Tensor old = tensor;
          found = replaced.emplace(old.id(), std::pair(old, replace(name, old)))
                      .first;
        }
        tensor = found->second.second;
      },
      nullptr)
      .start(*this);
}

void Module::load_values(const std::vector<NamedTensor>& values) {
  std::unordered_map<std::string, Tensor> by_name;
  for (const NamedTensor& value : values) by_name[value.name] = value.tensor;
  auto load = [&](const NamedTensor& target) {
    const auto found = by_name.find(target.name);
    SB_CHECK(found != by_name.end(), "load: no tensor is named '", target.name,
             "'");
    SB_CHECK(found->second.shape() == target.tensor.shape(), "load: '",
             target.name, "' has shape ", shape_text(found->second.shape()),
             ", the model needs ", shape_text(target.tensor.shape()));
    target.tensor.copy_from(found->second);
  };
  for (const NamedTensor& target : named_parameters()) load(target);
  for (const NamedTensor& target : named_buffers()) load(target);
}

void Module::clear_grad() {
  for (const Tensor& parameter : parameters()) parameter.clear_grad();
}

void Module::set_requires_grad(bool on) {
  for (const Tensor& parameter : parameters()) parameter.set_requires_grad(on);
}

void Module::train(bool on) {
  for (const NamedModule& entry : named_modules()) entry.module->training_ = on;
}

void Module::add_forward_pre_hook(ForwardHook hook) {
  pre_hooks_.push_back(std::move(hook));
}

void Module::add_forward_hook(ForwardHook hook) {
  post_hooks_.push_back(std::move(hook));
}

void Module::clear_hooks() {
  pre_hooks_.clear();
  post_hooks_.clear();
}

namespace {

Tensor empty_parameter(const Shape& shape, const InitOptions& init) {
  MemoryScope kind(MemoryKind::kParameter);
  return Tensor::empty(shape_of(init.shards, shape), {init.dtype, init.device});
}

using Fill = std::function<void(const Tensor& x, const ShardView& view)>;

/// Pieces of one width at equal distances along a dimension.
struct Pieces {
  std::int64_t first = 0, width = 1, count = 1, step = 1;
};

/// The runs as pieces; empty where they are none.
std::optional<Pieces> as_pieces(const std::vector<IndexRun>& runs,
                                std::int64_t length) {
  const auto count = static_cast<std::int64_t>(runs.size());
  const Pieces pieces{runs[0].begin, runs[0].count, count, length / count};
  for (std::int64_t i = 0; i < count; ++i) {
    const IndexRun& run = runs[static_cast<std::size_t>(i)];
    if (run.begin != pieces.first + i * pieces.step ||
        run.count != pieces.width) {
      return {};
    }
  }
  return pieces;
}

// Fills a part as `fill` fills the whole. Each run of rows is a view
// [rows, between, pieces, piece] of [all rows, between, steps, step], where
// `pieces` are the runs of the other dimension that is cut.
void fill_part(const Tensor& part, const Shape& whole, const Shards& shards,
               const Fill& fill) {
  if (shards.empty() || part.numel() == 0) return fill(part, {});
  std::size_t other = 0;
  for (const Shard& shard : shards) {
    const auto dim = static_cast<std::size_t>(shard.dim);
    SB_CHECK(shard.dim == 0 || other == 0 || dim == other, "a parameter of ",
             shape_text(whole), ": cut dim 0 and one more dimension at most");
    if (dim > 0) other = dim;
  }
  std::int64_t between = 1, behind = 1;
  for (std::size_t i = 1; i < other; ++i) between *= whole[i];
  for (std::size_t i = other + 1; i < whole.size(); ++i) behind *= whole[i];
  const auto fill_pieces = [&](const Tensor& x, const Pieces& of) {
    std::int64_t row = 0;
    for (const IndexRun& rows : runs_of(shards, whole, 0)) {
      fill(reshape(x.rows_view(row, row + rows.count),
                   {rows.count, between, of.count, of.width * behind}),
           {{whole[0], between, of.count, of.step * behind},
            {rows.begin, 0, 0, of.first * behind},
            {}});
      row += rows.count;
    }
  };
  if (other == 0) return fill_pieces(part, {});
  const auto runs = runs_of(shards, whole, static_cast<std::int64_t>(other));
  if (const auto pieces = as_pieces(runs, whole[other])) {
    return fill_pieces(part, *pieces);
  }
  // Columns of unequal widths are drawn alone, and put side by side
  const MemoryScope kind(MemoryKind::kWorkspace);
  Tensors drawn;
  for (const IndexRun& run : runs) {
    Shape shape = part.shape();
    shape[other] = run.count;
    drawn.push_back(Tensor::empty(shape, part.options()));
    fill_pieces(drawn.back(), {run.begin, run.count, 1, whole[other]});
  }
  part.copy_from(concat(drawn, static_cast<std::int64_t>(other)));
}

}  // namespace

Tensor make_parameter(const std::string& name, const Shape& shape,
                      double stddev, const InitOptions& init) {
  Tensor parameter = empty_parameter(shape, init);
  if (stddev == 0) {
    parameter.zero();
  } else {
    fill_part(parameter, shape, init.shards,
              [&](const Tensor& x, const ShardView& view) {
                fill_normal(x, init.seed, stream_of(name), 0, stddev, view);
              });
  }
  return parameter.set_requires_grad();
}

Tensor make_uniform_parameter(const std::string& name, const Shape& shape,
                              double bound, const InitOptions& init) {
  Tensor parameter = empty_parameter(shape, init);
  fill_part(parameter, shape, init.shards,
            [&](const Tensor& x, const ShardView& view) {
              fill_uniform(x, init.seed, stream_of(name), -bound, bound, view);
            });
  return parameter.set_requires_grad();
}

Tensor make_constant_parameter(const Shape& shape, double value,
                               const InitOptions& init) {
  Tensor parameter = empty_parameter(shape, init);
  parameter.fill(value);
  return parameter.set_requires_grad();
}

}  // namespace shardbook
