// Names, ties, copies, hooks, values.

#include "core/module.h"

#include "core/layers.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

class Block : public ModuleOf<Block> {
 public:
  explicit Block(const std::string& name)
      : fc1(name + ".fc1", 3, 4, f64_init()),
        fc2(name + ".fc2", 4, 3, f64_init(), /*with_bias=*/false) {}
  Tensor forward(const Tensor& x) override { return fc2(tanh(fc1(x))); }
  void members(MemberVisitor& visit) override {
    visit.module("fc1", fc1);
    visit.module("fc2", fc2);
  }
  std::string type_name() const override { return "Block"; }

  Linear fc1, fc2;
};

/// Two blocks, a norm with buffers, and an output tied to an embedding.
class Net : public ModuleOf<Net> {
 public:
  Net()
      : wte("wte", 5, 3, f64_init()),
        a("a"),
        b("b"),
        norm(3, f64_init()),
        head(wte.weight) {}
  Tensor forward(const Tensor& tokens) override {
    return matmul(norm(b(a(wte(tokens)))), head, false, true);
  }
  void members(MemberVisitor& visit) override {
    visit.module("wte", wte);
    visit.module("a", a);
    visit.module("b", b);
    visit.module("norm", norm);
    visit.parameter("head", head);
  }
  std::string type_name() const override { return "Net"; }

  Embedding wte;
  Block a, b;
  BatchNorm norm;
  Tensor head;
};

std::vector<std::string> names(const std::vector<NamedTensor>& named) {
  std::vector<std::string> result;
  for (const NamedTensor& entry : named) result.push_back(entry.name);
  return result;
}

Tensor tokens() { return Tensor::from_values<std::int64_t>({0, 3, 1, 4}, {4}); }

TEST(Module, NamesParametersInOrderAndTiesOnce) {
  Net net;
  EXPECT_EQ(
      names(net.named_parameters()),
      (std::vector<std::string>{"wte.weight", "a.fc1.weight", "a.fc1.bias",
                                "a.fc2.weight", "b.fc1.weight", "b.fc1.bias",
                                "b.fc2.weight", "norm.weight", "norm.bias"}));
  EXPECT_EQ(
      names(net.named_buffers()),
      (std::vector<std::string>{"norm.running_mean", "norm.running_var"}));
  EXPECT_EQ(net.num_parameters(), 15 + 2 * (12 + 4 + 12) + 6);
  std::vector<std::string> modules;
  for (const NamedModule& entry : net.named_modules()) {
    modules.push_back(entry.name + ":" + entry.module->type_name());
  }
  EXPECT_EQ(modules, (std::vector<std::string>{
                         ":Net", "wte:Embedding", "a:Block", "a.fc1:Linear",
                         "a.fc2:Linear", "b:Block", "b.fc1:Linear",
                         "b.fc2:Linear", "norm:BatchNorm"}));
}

TEST(Module, ParametersAreBookedAndNeedGradients) {
  const OwnDevice own;
  Net net;
  for (const Tensor& p : net.parameters()) EXPECT_TRUE(p.requires_grad());
  for (const Tensor& p : net.buffers()) EXPECT_FALSE(p.requires_grad());
  EXPECT_EQ(own.device.memory().current(MemoryKind::kParameter),
            8 * (net.num_parameters() + 6));
  EXPECT_EQ(own.device.memory().current_total,
            own.device.memory().current(MemoryKind::kParameter));
}

TEST(Module, AClonesTensorsAreTheSame) {
  Net net;
  const std::unique_ptr<Module> copy = net.clone();
  const auto a = net.named_parameters(), b = copy->named_parameters();
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].name, b[i].name);
    EXPECT_TRUE(a[i].tensor.is_same(b[i].tensor));
  }
}

TEST(Module, ReplacedTensorsKeepTheirTies) {
  Net net;
  const Tensor before = net(tokens());
  const std::unique_ptr<Module> replica = net.clone();
  std::vector<std::string> asked;
  replica->replace_tensors([&](const std::string& name, const Tensor& t) {
    asked.push_back(name);
    return t.clone();
  });
  // Parameters and buffers, each once.
  EXPECT_EQ(asked.size(), 11u);
  auto& copy = dynamic_cast<Net&>(*replica);
  EXPECT_TRUE(copy.head.is_same(copy.wte.weight));
  EXPECT_FALSE(copy.head.shares_storage(net.head));
  EXPECT_TRUE(net.head.is_same(net.wte.weight));
  EXPECT_TRUE(bitwise_equal((*replica)(tokens()), before.detach()));
  // Changes to the replica do not reach the original.
  copy.head.fill(0);
  EXPECT_TRUE(bitwise_equal(net(tokens()).detach(), before.detach()));
}

TEST(Module, ATiedParameterReceivesBothGradients) {
  Net tied;
  tied.train(false);
  sum(tied(tokens())).backward();
  Net loose;
  loose.train(false);
  loose.head = loose.wte.weight.clone().set_requires_grad();
  sum(loose(tokens())).backward();
  expect_close(tied.head.grad(),
               add(loose.head.grad(), loose.wte.weight.grad()), 1e-15);
}

TEST(Module, GradientsOfANetworkEqualDifferences) {
  Net net;
  Tensors parameters = net.parameters();
  EXPECT_LT(autograd::check_gradients(
                [&](const Tensors&) { return weighted_sum(net(tokens())); },
                parameters),
            kGradientTolerance);
}

TEST(Module, HooksSeeAndReplaceWhatPasses) {
  Block block("x");
  std::vector<std::string> order;
  block.add_forward_pre_hook([&](Module& module, Tensors& in) {
    order.push_back("before " + module.type_name());
    in[0] = scale(in[0], 2);
  });
  block.add_forward_hook([&](Module&, Tensors& out) {
    order.push_back("after");
    out[0] = add_scalar(out[0], 1);
  });
  block.fc1.add_forward_hook(
      [&](Module& module, Tensors&) { order.push_back(module.type_name()); });
  const Tensor x = noise({2, 3});
  const Tensor y = block(x);
  EXPECT_EQ(order,
            (std::vector<std::string>{"before Block", "Linear", "after"}));
  expect_close(y, add_scalar(block.forward(scale(x, 2)), 1), 0);
  block.clear_hooks();
  order.clear();
  block(x);
  EXPECT_EQ(order, std::vector<std::string>{"Linear"});
}

TEST(Module, AHookMayAddHooks) {
  Block block("x");
  int calls = 0;
  block.add_forward_hook([&](Module& module, Tensors&) {
    module.add_forward_hook([&](Module&, Tensors&) { ++calls; });
  });
  block(noise({2, 3}));
  EXPECT_EQ(calls, 0);
  block(noise({2, 3}));
  EXPECT_EQ(calls, 1);
}

TEST(Module, TrainReachesEverythingBelow) {
  Net net;
  net.train(false);
  for (const NamedModule& entry : net.named_modules()) {
    EXPECT_FALSE(entry.module->is_training()) << entry.name;
  }
  EXPECT_FALSE(net.clone()->is_training());
  net.train();
  EXPECT_TRUE(net.norm.is_training());
}

TEST(Module, ClearGradForgetsAll) {
  Net net;
  sum(net(tokens())).backward();
  net.clear_grad();
  for (const Tensor& p : net.parameters()) EXPECT_FALSE(p.grad().defined());
  net.set_requires_grad(false);
  EXPECT_FALSE(net(tokens()).requires_grad());
}

TEST(LoadValues, CopiesByNameAndConverts) {
  Net net, other;
  std::vector<NamedTensor> values_of;
  for (const auto& named : {net.named_parameters(), net.named_buffers()}) {
    for (const NamedTensor& entry : named) {
      values_of.push_back(
          {entry.name, Tensor::full(entry.tensor.shape(), 0.5, kOfF32)});
    }
  }
  values_of.push_back({"unknown", noise({3})});
  const void* id = other.head.id();
  other.load_values(values_of);
  EXPECT_EQ(other.head.id(), id);
  EXPECT_EQ(other.head.dtype(), DType::kF64);
  for (const Tensor& p : other.parameters()) {
    for (double v : values(p)) EXPECT_EQ(v, 0.5);
  }
  values_of[1].tensor = noise({4, 3});
  expect_error([&] { other.load_values(values_of); },
               {"'a.fc1.weight'", "[4, 3]", "[3, 4]"});
  values_of.erase(values_of.begin());
  expect_error([&] { other.load_values(values_of); },
               {"no tensor", "'wte.weight'"});
}

TEST(Module, SaysWhatItDoesNotTake) {
  class Nothing : public ModuleOf<Nothing> {
   public:
    void members(MemberVisitor&) override {}
    std::string type_name() const override { return "Nothing"; }
  };
  Nothing nothing;
  expect_error([&] { nothing(noise({1})); }, {"Nothing", "one tensor"});
  Block block("x");
  expect_error(
      [&] {
        block(Tensors{noise({1, 3}), noise({1, 3})});
      },
      {"Block", "given 2"});
}

TEST(Sequential, NamesByPositionAndCopiesDeeply) {
  Sequential net;
  net.add(Linear("0", 3, 4, f64_init()))
      .add(Relu())
      .add(Linear("2", 4, 2, f64_init()));
  EXPECT_EQ(
      names(net.named_parameters()),
      (std::vector<std::string>{"0.weight", "0.bias", "2.weight", "2.bias"}));
  const Tensor x = noise({5, 3});
  Sequential copy = net;
  EXPECT_TRUE(bitwise_equal(copy(x).detach(), net(x).detach()));
  // The copy's structure is its own: replacing there leaves the original.
  copy.replace_tensors([](const std::string&, const Tensor& t) {
    return Tensor::zeros(t.shape(), t.options());
  });
  EXPECT_EQ(values(copy(x)), std::vector<double>(10, 0));
  EXPECT_GT(values(square(sum(net(x))))[0], 0);
  EXPECT_EQ(net.size(), 3u);
  EXPECT_EQ(net[1].type_name(), "Relu");
}

TEST(Dropout, IsForTrainingOnly) {
  Dropout layer(0.5);
  const Tensor x = Tensor::full({64}, 1);
  EXPECT_FALSE(bitwise_equal(layer(x), x));
  layer.train(false);
  EXPECT_TRUE(bitwise_equal(layer(x), x));
}

TEST(Parameters, OnMetaHaveShapesAndBytes) {
  const Device meta = Device::meta();
  InitOptions init;
  init.device = meta;
  Linear linear("l", 1 << 20, 1 << 20, init);
  EXPECT_TRUE(linear.weight.is_meta());
  EXPECT_EQ(meta.memory().current(MemoryKind::kParameter),
            4 * ((1LL << 40) + (1 << 20)));
}

}  // namespace
}  // namespace shardbook
