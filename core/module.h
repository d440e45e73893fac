#pragma once

// Modules: parameters with names, and the forward that uses them.
//
// A module lists its members once, in order, and everything else follows:
// names, copies, replicas, checkpoints.
//
//   class Block : public ModuleOf<Block> {
//    public:
//     Tensor forward(const Tensor& x) override { return fc2(gelu(fc1(x))); }
//     void members(MemberVisitor& visit) override {
//       visit.module("fc1", fc1);
//       visit.module("fc2", fc2);
//     }
//     Linear fc1, fc2;
//   };
//
// Submodules are held by value, so that copying a module copies its structure
// and shares its tensors; a replica is a copy whose tensors are then replaced.
// Call a module with `module(x)`, which also runs its hooks.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/shards.h"
#include "core/tensor.h"

namespace shardbook {

class Module;

/// Sees the members of a module; see Module::members.
class MemberVisitor {
 public:
  virtual ~MemberVisitor() = default;
  virtual void parameter(const std::string& name, Tensor& tensor) = 0;
  /// State that is saved and moved but not trained.
  virtual void buffer(const std::string& name, Tensor& tensor) = 0;
  virtual void module(const std::string& name, Module& child) = 0;
};

struct NamedTensor {
  std::string name;  ///< path from the root: "h.0.attn.c_attn.weight"
  Tensor tensor;
};

struct NamedModule {
  std::string name;
  Module* module;
};

/// Before forward: sees (and may replace) the inputs. After: the outputs.
using ForwardHook = std::function<void(Module& module, Tensors& tensors)>;

class Module {
 public:
  virtual ~Module() = default;

  /// Runs hooks and forward.
  Tensor operator()(const Tensor& x);
  Tensors operator()(const Tensors& inputs);

  /// What the module computes; override one of the two.
  virtual Tensor forward(const Tensor& x);
  virtual Tensors forward_all(const Tensors& inputs);

  /// Passes every member to `visit`, in the order of definition.
  virtual void members(MemberVisitor& visit) = 0;
  /// A module of the same type and structure that shares all tensors.
  virtual std::unique_ptr<Module> clone() const = 0;
  /// The type's name, for messages and wrapping policies.
  virtual std::string type_name() const { return "Module"; }

  /// Parameters in order of definition. A tensor in two places is listed once,
  /// under its first name.
  std::vector<NamedTensor> named_parameters();
  Tensors parameters();
  std::vector<NamedTensor> named_buffers();
  Tensors buffers();
  /// This module ("") and all below it, parents first.
  std::vector<NamedModule> named_modules();
  /// Elements of all parameters.
  std::int64_t num_parameters();

  /// Replaces every parameter and buffer by `replace(path, tensor)`; a tensor
  /// in two places is replaced by one tensor.
  void replace_tensors(
      const std::function<Tensor(const std::string& name,
                                 const Tensor& tensor)>& replace);
  /// Copies values by name. Throws Error for a missing name or another shape.
  void load_values(const std::vector<NamedTensor>& values);
  /// Forgets all gradients.
  void clear_grad();
  void set_requires_grad(bool on);

  /// Training (dropout, batch statistics) or evaluation, for all below.
  void train(bool on = true);
  bool is_training() const { return training_; }

  void add_forward_pre_hook(ForwardHook hook);
  void add_forward_hook(ForwardHook hook);
  void clear_hooks();
  bool has_hooks() const { return !pre_hooks_.empty() || !post_hooks_.empty(); }

 private:
  bool training_ = true;
  std::vector<ForwardHook> pre_hooks_;
  std::vector<ForwardHook> post_hooks_;
};

/// Gives `Derived` its clone.
template <typename Derived, typename Base = Module>
class ModuleOf : public Base {
 public:
  using Base::Base;
  std::unique_ptr<Module> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }
};

/// A module of any type, held by value: a copy of it is a clone. For models
/// whose layers can be replaced.
class AnyModule {
 public:
  AnyModule(std::unique_ptr<Module> module) : module_(std::move(module)) {}
  AnyModule(const AnyModule& other) : module_(other.module_->clone()) {}
  AnyModule(AnyModule&&) = default;
  AnyModule& operator=(AnyModule other) {
    module_ = std::move(other.module_);
    return *this;
  }

  Tensor operator()(const Tensor& x) { return (*module_)(x); }
  Module& operator*() const { return *module_; }
  /// The module as type M; throws std::bad_cast if it has another.
  template <typename M>
  M& as() const {
    return dynamic_cast<M&>(*module_);
  }

 private:
  std::unique_ptr<Module> module_;
};

/// How weights begin: drawn from named streams, or left on meta.
struct InitOptions {
  std::uint64_t seed = 0;
  DType dtype = DType::kF32;
  Device device{};
  /// The part to make. It draws the same elements as the whole parameter has
  /// there.
  Shards shards{};
};

/// A parameter with values from normal(0, stddev) in the stream of `name`
/// (stddev 0: zeros). Here and below, `shape` is the whole parameter's, and
/// init.shards selects the part to make: cuts of dim 0, and of one other
/// dimension.
Tensor make_parameter(const std::string& name, const Shape& shape,
                      double stddev, const InitOptions& init);
/// A parameter with values from uniform(-bound, bound).
Tensor make_uniform_parameter(const std::string& name, const Shape& shape,
                              double bound, const InitOptions& init);
/// A parameter that is `value` everywhere.
Tensor make_constant_parameter(const Shape& shape, double value,
                               const InitOptions& init);

}  // namespace shardbook
