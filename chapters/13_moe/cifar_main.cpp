// DeepSpeed's CIFAR example: a convolutional net with layers of experts.
//
//   cifar_moe --world-size 4 --num-experts 2,4 --residual
//   cifar_moe --data cifar-10-batches-bin --steps 500
//
// Without --data, images are made up in the same format.

#include <fmt/format.h>

#include "chapters/13_moe/conv_net.h"
#include "chapters/13_moe/load.h"
#include "chapters/common/run/options.h"
#include "comm/launch.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    int world_size = 2;
    std::string data, num_experts = "2,4";
    moe::ConvNetOptions net;
    moe::ConvTraining training;
    CommandLine line("cifar_moe", "A convolutional net with experts.",
                     "0, the net was trained");
    line.add("--world-size", &world_size, "ranks, threads of this process", 1);
    line.add("--data", &data, "a file or folder of CIFAR-10's binary version");
    line.add("--num-experts", &num_experts, "experts of each layer: 2,4");
    line.add("--residual", &net.moe.use_residual, "an MLP beside the experts");
    line.add("--share-mlp", &net.share_mlp, "the same one in all layers");
    line.add("--top-k", &net.moe.gate.k, "experts that an image visits", 1);
    line.add("--ep", &training.ep, "ranks that share a set of experts");
    line.add("--steps", &training.steps, "steps");
    line.add("--batch", &training.batch, "images per step, all ranks", 1);
    line.add("--lr", &training.lr, "learning rate of Adam");
    line.add("--seed", &net.seed, "of weights and made-up images");
    line.parse(argc, argv);
    net.num_experts = read_counts("--num-experts", num_experts,
                                  "give numbers of experts such as 2,4");
    const moe::CifarImages images = data.empty()
                                        ? moe::synthetic_cifar10(1000, net.seed)
                                        : moe::read_cifar10(data);
    fmt::print("{} images, {} parameters\n", images.size(),
               moe::ConvNet(net).num_parameters());
    run_ranks(world_size, [&](ProcessGroup& world) {
      const moe::ConvResult result =
          moe::train_conv_net(net, training, images, world);
      if (world.rank() != 0 || result.losses.empty()) return;
      fmt::print("loss {:.4f} -> {:.4f}\n{}", result.losses.front(),
                 result.losses.back(), moe::draw_loads(result.loads));
    });
    return 0;
  });
}
