// PyTorch's tutorial "Data Parallelism", on three devices: a linear layer of 5
// to 2, and 100 rows in batches of 30.
//
//   ./shardbook toy data_parallel
//
//   net = torch.nn.DataParallel(model, device_ids=[0, 1, 2])
//   output = net(input_var)  # input_var can be on any device, including CPU

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/common/toy.h"
#include "core/autograd.h"
#include "core/context.h"
#include "core/optim.h"

using namespace shardbook;

/// Which devices send in copy number `k`, and to whom.
std::string message(const data_parallel::DataParallel& net, std::size_t k) {
  std::string text;
  int root = 0;
  for (const Device& device : net.device_ids()) {
    const CommRecord record = net.ledger()->records(device)[k];
    root = record.root_or_peer;
    if (record.numel_to_peers == 0) continue;
    text += fmt::format("{}{} sends {} elements", text.empty() ? "" : ", ",
                        device.name(), record.numel_to_peers);
    if (record.group_rank == root) return text + " to the other two";
  }
  return text + fmt::format(" to cpu:{}", root);
}

int main() {
  // 1. The model is on the main device, and so is its optimizer
  const std::vector<Device> devices = {Device::cpu(0), Device::cpu(1),
                                       Device::cpu(2)};
  RankContext context(devices[0]);
  const RankContext::Scope scope(context);
  toy::Torch torch(0);
  Linear model = torch.linear("fc", 5, 2);
  data_parallel::DataParallel net(model, devices);
  const OptimizerOptions sgd{/*lr=*/0.1};
  const auto optimizer = make_optimizer("sgd", model.parameters(), sgd);
  // 2. One device has the same model and the same rows
  Linear one = toy::Torch(0).linear("fc", 5, 2);
  const auto one_optimizer = make_optimizer("sgd", one.parameters(), sgd);
  const Tensor data = torch.randn({100, 5});
  Tensors found, expected;
  for (int first = 0; first < 100; first += 30) {
    const Tensor rows = data.rows_view(first, std::min(first + 30, 100));
    // 3. The input may be on any device, here on the last
    const Tensor input = to_device(rows, devices[2]);
    std::array<Shape, 3> in_model;
    const Tensor output = net(input, [&](Module& replica, const Tensor& x) {
      in_model[static_cast<std::size_t>(x.device().index())] = x.shape();
      return replica(x);
    });
    for (const Shape& shape : in_model) {
      fmt::print("In Model: input size {}\n", shape_text(shape));
    }
    fmt::print("Outside: input size {}, output size {}\n",
               shape_text(input.shape()), shape_text(output.shape()));
    // 4. Loss, backward and update, as on one device
    const Tensor loss = mean(square(output));
    loss.backward();
    const Tensor one_loss = mean(square(one(rows)));
    one_loss.backward();
    fmt::print("loss {:.6f}\n", loss.item());
    found.insert(found.end(), {loss, model.weight.grad(), model.bias.grad()});
    expected.insert(expected.end(),
                    {one_loss, one.weight.grad(), one.bias.grad()});
    // 5. The nine steps of the first batch
    if (first == 0) {
      fmt::print("1 scatter the input: {}\n", message(net, 0));
      fmt::print("2 replicate the model: {}\n", message(net, 1));
      fmt::print("3 forward: three threads, {} on each\n",
                 shape_text(in_model[0]));
      fmt::print("4 gather the outputs: {}\n", message(net, 2));
      fmt::print("5 loss: {} on {}\n", shape_text(output.shape()),
                 loss.device().name());
      fmt::print("6 scatter their gradient: {}\n", message(net, 3));
      fmt::print("7 backward: a thread per device\n");
      fmt::print("8 add up the gradients: {}\n", message(net, 4));
      fmt::print("9 update: {} elements on {}\n", model.num_parameters(),
                 model.weight.device().name());
    }
    optimizer->step(), one_optimizer->step();
    model.clear_grad(), one.clear_grad();
  }
  // 6. The same losses, gradients and weights
  fmt::print("bias {}\n", toy::values_text(model.bias));
  found.insert(found.end(), {model.weight, model.bias});
  expected.insert(expected.end(), {one.weight, one.bias});
  return toy::compare(found, expected);
}
