// PyTorch's post on FSDP: a net on two ranks, wrapped by policy and by hand.
//
//   ./shardbook toy fsdp

#include <fmt/format.h>

#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "chapters/common/toy.h"
#include "comm/launch.h"
#include "core/optim.h"

using namespace shardbook;

toy::Net make_net() {
  toy::Torch torch(0);
  toy::Net net;
  net.add("layer1", torch.linear("layer1", 8, 4));
  net.add("layer2", torch.linear("layer2", 4, 16));
  net.add("layer3", torch.linear("layer3", 16, 4));
  return net;
}

/// Notes what happens to each unit, in order.
struct Phases : CommObserver {
  void on_issue(const CommRecord& call) override {  // "gather layer1"
    note(call.label.substr(call.label.find(' ') + 1), comm_op_name(call.op));
  }
  void note(const std::string& unit, const std::string& phase) {
    if (of.count(unit) != 0) of[unit] += ", " + phase;
  }
  std::map<std::string, std::string> of;
};

/// Trains three steps. `status` becomes 1 where one device has other numbers.
void train(ProcessGroup& world, const std::string& way, int& status) {
  // 1. Choose the units: by a policy, or by hand
  toy::Net net = make_net(), one = make_net();
  fsdp::FsdpOptions options;
  options.cpu_offload.offload_params = true;
  options.backward_prefetch = fsdp::BackwardPrefetch::kNone;
  fsdp::WrapPlan plan;
  if (way == "by hand") {
    const fsdp::EnableWrap scope(plan, fsdp::UnitOptions{true, {}});
    wrap(plan, net[0]), wrap(plan, net[2]);
  } else {  // of 50 or more elements; by default, of 100 million
    options.auto_wrap_policy =
        fsdp::size_based_auto_wrap_policy(way == "by size" ? 50 : 100'000'000);
  }
  // 2. Shard: each rank keeps its part of each unit, on the host
  const auto phases = std::make_shared<Phases>();
  world.set_observer(phases);
  fsdp::FullyShardedDataParallel model(net, world, options, plan);
  std::string text = way + "\n";
  for (const fsdp::FlatParameter* unit : model.units()) {
    phases->of[unit->name()] = "shard";
    text += fmt::format("  {} has {} elements, {} on each rank\n", unit->name(),
                        unit->layout().numel, unit->shard().numel());
  }
  text += "  the shards are on " + model.parameters()[0].device().name() + "\n";
  for (const NamedModule& each : net.named_modules()) {
    const std::string unit = each.name.empty() ? "root" : each.name;
    each.module->add_forward_hook([phases, unit](Module&, Tensors& outputs) {
      phases->note(unit, "forward");
      outputs[0].add_grad_hook([phases, unit](const Tensor&) {
        phases->note(unit, "backward");
        return Tensor();
      });
    });
  }
  // 3. Adam on the shards, beside one device with the rows of both ranks
  const auto adam = make_optimizer("adam", model.parameters(), {1e-4});
  const auto one_adam = make_optimizer("adam", one.parameters(), {1e-4});
  toy::Torch torch[] = {toy::Torch(1), toy::Torch(2)};
  for (int step = 0; step < 3; ++step) {
    const Tensors x = {torch[0].randn({4, 8}), torch[1].randn({4, 8})};
    const Tensors labels = {torch[0].randn({4, 4}), torch[1].randn({4, 4})};
    const auto own = static_cast<std::size_t>(world.rank());
    const Tensor loss = mse_loss(model(x[own]), labels[own]);
    loss.backward(), adam->step(), model.clear_grad();
    mse_loss(one(concat(x, 0)), concat(labels, 0)).backward();
    one_adam->step(), one.clear_grad();
    // 4. The seven phases of the first step
    for (const auto& [unit, seen] : phases->of) {
      if (step == 0) text += fmt::format("  {}: {}, update\n", unit, seen);
    }
    text += fmt::format("  loss of rank 0 {:.6f}\n", loss.item());
  }
  // 5. The same weights, from the shards of both ranks
  const auto whole = model.summon_full_params();
  if (world.rank() != 0) return;
  fmt::print("{}  ", text);
  status |= toy::compare(net.parameters(), one.parameters());
}

int main() {
  int status = 0;
  for (const char* way : {"default policy", "by size", "by hand"})
    run_ranks(2, [&](ProcessGroup& world) { train(world, way, status); });
  return status;
}
