"""DeepSpeed's CIFAR example: losses of the original, for cifar_moe's tests.

  cifar_moe.py FILE    writes tests/chapters/15_engine/cifar_losses.txt

Weights, images and the gates' random numbers are the book's (core/ops.h,
random_bits), so that both programs compute with the same numbers.
"""

import logging
import sys

import torch_python

torch_python.require_torch()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from toys_of_many_ranks import on_ranks  # noqa: E402
from torch import nn  # noqa: E402

STEPS = 12
IMAGES = 64
COLUMNS = ("ranks, ep-world-size, stage, num-experts,\n# mlp-type, top-k, "
           "min-capacity, noisy-gate-policy, largest weight, losses")
# With weights up to 0.2 gradients are clipped. Where experts are spread,
# DeepSpeed clips by the mean of the ranks' norms, and this book by the norm of
# the whole gradient: those runs stay below the limit.
RUNS = [
    (1, 1, 0, [2, 4], "residual", 1, 0, None, 0.2),
    (1, 1, 0, [2, 4], "standard", 1, 0, "RSample", 0.1),
    (1, 1, 0, [2, 4], "residual", 1, 16, "Jitter", 0.1),
    (1, 1, 0, [2, 4], "standard", 2, 0, None, 0.1),
    (2, 1, 0, [2, 4], "residual", 1, 0, None, 0.2),
    (2, 2, 0, [2, 4], "residual", 1, 0, None, 0.1),
    (2, 2, 1, [2, 4], "standard", 1, 4, None, 0.1),
    (2, 2, 2, [2, 4], "residual", 2, 0, None, 0.1),
    (4, 2, 2, [2, 4], "residual", 1, 0, None, 0.1),
    (4, 4, 1, [4], "standard", 1, 2, "RSample", 0.1),
]


# ---- The book's random numbers: Philox4x32-10 of a seed, a stream, an element.

def stream_of(name):
    value = 14695981039346656037
    for each in name.encode():
        value = (value ^ each) * 1099511628211 % 2**64
    return value >> 1


def random_bits(seed, stream, elements):
    elements = np.asarray(elements, dtype=np.uint64)
    block, low = elements // 4, np.uint64(2**32 - 1)
    c = [block & low, block >> np.uint64(32),
         np.full_like(block, stream % 2**32), np.full_like(block, stream >> 32)]
    key = [seed % 2**32, seed >> 32]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(key[0]), p1 & low,
             (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(key[1]), p0 & low]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return np.choose((elements % 4).astype(int), c)


def uniform(seed, stream, elements):
    return (random_bits(seed, stream, elements) + 0.5) / 2**32


def images():
    """synthetic_cifar10(IMAGES, seed 1), as floats, and its labels."""
    labels = random_bits(1, stream_of("cifar.labels"), np.arange(IMAGES)) % 10
    base = np.stack([(labels >> (2 * c % 5)) % 4 * 64 for c in range(3)], 1)
    noise = random_bits(1, stream_of("cifar.pixels"),
                        np.arange(IMAGES * 3 * 1024)) % 64
    pixels = base[:, :, None] + noise.reshape(IMAGES, 3, 1024)
    floats = pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)
    return (torch.from_numpy(floats).reshape(IMAGES, 3, 32, 32),
            torch.from_numpy(labels.astype(np.int64)))


def weight(name, shape, most):
    """[in, out] where PyTorch has [out, in]."""
    values = 2 * uniform(0, stream_of(name), np.arange(np.prod(shape))) - 1
    return torch.from_numpy((most * values).astype(np.float32)).reshape(shape)


class Draws:
    """The random numbers of the gates of one rank."""

    def __init__(self, rank, ranks, layers):
        self.rank, self.ranks, self.layers = rank, ranks, layers
        self.step = 0
        self.calls = {}

    def uniform(self, purpose, shape, element):
        """`element` of the token's number in the batch and the column."""
        layer = self.calls.get(purpose, 0) % self.layers
        self.calls[purpose] = self.calls.get(purpose, 0) + 1
        stream = stream_of(f"moe_layer_list.{layer}.gate.{purpose}")
        stream += 0x9E3779B97F4A7C15 * (self.step + 1)
        token = self.rank + self.ranks * np.arange(shape[0])[:, None]
        column = np.arange(shape[1])[None, :]
        return torch.from_numpy(uniform(0, stream % 2**64,
                                        element(token, column)))

    def gumbel(self, purpose, shape):
        draws = self.uniform(purpose, shape, lambda t, c: t + (c << 40))
        return (-(-draws.log()).log()).float()

    def give_to_deepspeed(self, top_k):
        from deepspeed.moe import sharded_moe
        cpu = torch.device("cpu")
        sharded_moe.exp_selection_uniform_map[cpu] = lambda shape: (
            self.uniform("rts", shape, lambda t, c: t + 0 * c))
        sharded_moe.gumbel_map[cpu] = lambda shape: self.gumbel(
            "rsample" if top_k == 1 else "second", shape)
        sharded_moe.uniform_map[cpu] = lambda shape: (0.99 + 0.02 * self.uniform(
            "jitter", shape, lambda t, c: t * shape[1] + c)).float()


# ---- The example (DeepSpeedExamples, training/cifar/cifar10_deepspeed.py)

def config(stage):
    return {
        "train_batch_size": 16,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8,
                       "weight_decay": 3e-7,
                       "torch_adam": True},  # a CPU has no fused one
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001,
                       "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
    }


class Net(nn.Module):
    def __init__(self, ep, num_experts, mlp_type, top_k, min_capacity, policy):
        from deepspeed.moe.layer import MoE
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        fc3 = nn.Linear(84, 84)
        self.moe_layer_list = nn.ModuleList([
            MoE(hidden_size=84, expert=fc3, num_experts=n, ep_size=ep,
                use_residual=mlp_type == "residual", k=top_k,
                min_capacity=min_capacity, noisy_gate_policy=policy)
            for n in num_experts])
        self.fc4 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        for layer in self.moe_layer_list:
            x, _, _ = layer(x)
        return self.fc4(x)


def fill(net, ep, rank, most):
    """The book's names and layouts; experts lie in one tensor [E, in, out]."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parts = name.replace("deepspeed_moe.", "").split(".")
            if "deepspeed_experts" in parts:
                layer, kind = int(parts[1]), parts[-1]
                local = net.moe_layer_list[layer].num_local_experts
                expert = rank % ep * local + int(parts[4])
                shape = [local * ep, *list(parameter.shape)[::-1]]
                whole = weight(f"moe_layer_list.{layer}.experts.c_fc.{kind}",
                               shape, most)
                parameter.copy_(whole[expert].T if kind == "weight"
                                else whole[expert])
                continue
            name = ".".join(each for each in parts if each != "wg")
            if parameter.dim() == 2:
                parameter.copy_(weight(name, list(parameter.shape)[::-1],
                                       most).T)
            else:
                parameter.copy_(weight(name, list(parameter.shape), most))


def train(rank, run, path):
    ranks, ep, stage, num_experts, mlp_type, top_k, least, policy, most = run
    import deepspeed
    from deepspeed.moe.utils import \
        split_params_into_different_moe_groups_for_optimizer
    from deepspeed.utils import logger
    logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    net = Net(ep, num_experts, mlp_type, top_k, least, policy)
    fill(net, ep, rank, most)
    draws = Draws(rank, ranks, len(num_experts))
    draws.give_to_deepspeed(top_k)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(net.parameters()), "name": "parameters"})
    engine, _, _, _ = deepspeed.initialize(
        model=net, model_parameters=groups, config=config(stage))
    pixels, labels = images()
    losses = torch.empty(STEPS)
    for step in range(STEPS):
        draws.step = step
        rows = (16 * step + torch.arange(rank, 16, ranks)) % IMAGES
        loss = F.cross_entropy(engine(pixels[rows]), labels[rows])
        engine.backward(loss)
        engine.step()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    if rank == 0:
        with open(path, "a", encoding="utf-8") as file:
            print(ranks, ep, stage, ",".join(map(str, num_experts)), mlp_type,
                  top_k, least, policy or "none", most,
                  *(f"{x:.7f}" for x in (losses / ranks).tolist()), file=file)


def main(path):
    import deepspeed
    with open(path, "w", encoding="utf-8") as file:
        print(f"# torch {torch.__version__.split('+')[0]}, DeepSpeed "
              f"{deepspeed.__version__}: {COLUMNS}", file=file)
    for run in RUNS:
        on_ranks(run[0], train, run, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
