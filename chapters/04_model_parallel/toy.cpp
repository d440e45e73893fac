// PyTorch's tutorial "Single-Machine Model Parallel Best Practices": ToyModel,
// whose two layers are on two devices.
//
//   ./shardbook toy model_parallel
//
//   self.net1 = torch.nn.Linear(10, 10).to('cuda:0')
//   self.net2 = torch.nn.Linear(10, 5).to('cuda:1')
//   x = self.relu(self.net1(x.to('cuda:0')))
//   return self.net2(x.to('cuda:1'))

#include <fmt/format.h>

#include <functional>

#include "chapters/04_model_parallel/model_parallel.h"
#include "chapters/common/toy.h"
#include "core/context.h"
#include "core/optim.h"

using namespace shardbook;
using namespace shardbook::model_parallel;

/// Trains three steps on 20 random rows; returns the parameters, and the last
/// output and loss.
Tensors train(const std::string& name,
              const std::function<Tensor(const Tensor&)>& model,
              const std::vector<NamedTensor>& parameters) {
  // 4. One optimizer; it updates each parameter where it lies
  Tensors values;
  for (const NamedTensor& each : parameters) values.push_back(each.tensor);
  const auto optimizer = make_optimizer("sgd", values, {/*lr=*/0.001});
  toy::Torch torch(1);
  Tensor outputs, loss;
  for (int step = 0; step < 3; ++step) {
    outputs = model(torch.randn({20, 10}));
    // 5. The labels must be where the outputs are
    const Tensor labels = to_device(torch.randn({20, 5}), outputs.device());
    loss = mse_loss(outputs, labels);
    loss.backward();
    optimizer->step();
    for (const Tensor& value : values) value.clear_grad();
    fmt::print("{}: loss {:.6f}\n", name, loss.item());
  }
  values.insert(values.end(), {outputs.detach(), loss.detach()});
  return values;
}

int main() {
  // 1. Two devices, and the layers of the model
  const std::vector<Device> devices = {Device::cpu(0), Device::cpu(1)};
  RankContext context(devices[0]);
  const RankContext::Scope scope(context);
  toy::Torch torch(0);
  toy::Net net;
  net.add("net1", torch.linear("net1", 10, 10));
  net.add("relu", Relu());
  net.add("net2", torch.linear("net2", 10, 5));
  // 2. One device after the other; or splits of six rows, on both at a time
  ModelParallel naive(net, /*cut=*/2, devices, {});
  PipelineParallel pipelined(net, 2, devices, {}, /*split_size=*/6);
  for (const auto& [name, parameter] : naive.named_parameters()) {
    fmt::print("{} {} on {}\n", name, shape_text(parameter.shape()),
               parameter.device().name());
  }
  // 3. Both train as one device does
  const auto on_two = [](ModelParallel& model) {
    return [&model](const Tensor& x) { return model(x); };
  };
  const Tensors one = train(
      "one device", [&](const Tensor& x) { return net(x); },
      net.named_parameters());
  int status = toy::compare(
      train("two devices", on_two(naive), naive.named_parameters()), one);
  status |= toy::compare(
      train("in splits of 6", on_two(pipelined), pipelined.named_parameters()),
      one);
  return status;
}
