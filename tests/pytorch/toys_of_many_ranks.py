"""Originals of the toys of chapters 07 to 15; toys.py runs them.

Where the original needs GPUs or is no Python of today, its function prints what
its document says, and names the document.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn


def on_ranks(ranks, body, *arguments):
    """Runs body in so many processes over Gloo."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, ranks, body, arguments),
                                    nprocs=ranks)


def _rank(rank, folder, ranks, body, arguments):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks),
                      LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet",
                            rank=rank, world_size=ranks)
    body(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def show_groups(name, groups):
    print(name, *("[" + " ".join(map(str, each)) + "]" for each in groups))


# ---- 07: groups that Megatron-LM's parallel_state.py of Megatron-DeepSpeed
# f4157be makes without, and with split rank 2.

def tensor_parallel():
    x = torch.arange(1, 9).reshape(2, 4)
    a = torch.arange(1, 9).reshape(4, 2)
    by_rows = x[:, :2] @ a[:2] + x[:, 2:] @ a[2:]
    by_columns = torch.cat([x @ a[:, :1], x @ a[:, 1:]], 1)
    for product in by_rows, by_columns:
        print("X A", *product[0].tolist())
        print(*product[1].tolist())
    print(MEGATRON_GROUPS)


MEGATRON_GROUPS = """\
tensor [0 1] [2 3] [4 5] [6 7] [8 9] [10 11] [12 13] [14 15]
pipeline [0 4 8 12] [1 5 9 13] [2 6 10 14] [3 7 11 15]
data [0 2] [1 3] [4 6] [5 7] [8 10] [9 11] [12 14] [13 15]
model [0 1 4 5 8 9 12 13] [2 3 6 7 10 11 14 15]
embedding [0 12] [1 13] [2 14] [3 15]
position [0] [1] [2] [3]
embedding [0 8 12] [1 9 13] [2 10 14] [3 11 15]
position [0 8] [1 9] [2 10] [3 11]"""


# ---- 08 to 10: what Colossal-AI's documents print. Those of 3D print weights of
# [128, 256] and [512, 64], an older version's: these are Linear3D's of 0.3.

def tensor_parallel_2d():
    show_mlp([128, 512], [512, 128], [8, 128], [8, 512])


def tensor_parallel_2p5d():
    show_mlp([128, 512], [512, 128], [4, 128], [4, 512])


def tensor_parallel_3d():
    show_mlp([64, 512], [256, 128], [4, 128], [4, 512])


def show_mlp(first, second, x, hidden):
    print(f"Weight of the first linear layer: {first}")
    print(f"Weight of the second linear layer: {second}")
    print(f"Input: {x}")
    print(f"Output of the first linear layer: {hidden}")
    print(f"Output of the second linear layer: {x}")


# ---- 11: newer torch has no PairwiseParallel. ColwiseParallel and
# RowwiseParallel take its place, and in slices that of SequenceParallel of 2.1.

class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(32, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def dtensor():
    on_ranks(4, train_dtensor)


def train_dtensor(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module)
    for name, layout in ("pairwise", Replicate()), ("sequence", Shard(0)):
        torch.manual_seed(0)
        model = parallelize_module(
            ToyModel(), init_device_mesh("cpu", (4,)),
            {"net1": ColwiseParallel(input_layouts=layout),
             "net2": RowwiseParallel(output_layouts=layout)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        torch.manual_seed(1 + rank if name == "sequence" else 1)
        losses = torch.empty(3)
        for step in range(3):
            loss = model(torch.rand(20, 10)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.detach()
        if name == "sequence":
            dist.all_reduce(losses)
        if rank == 0:
            for part, tensor in model.named_parameters():
                show_layout(part, tensor)
            print("losses", *(f"{x:.6e}" for x in losses.tolist()))


def show_layout(name, tensor):
    """In the book's words; nn.Linear's weight is stored as [out, in]."""
    placement = tensor.placements[0]
    dim = tensor.dim() - 1 - placement.dim if placement.is_shard() else None
    whole, local = (list(x.shape)[::-1] for x in (tensor, tensor.to_local()))
    print(f"{name} {whole}: R -> {'R' if dim is None else f'S({dim})'}, "
          f"{local} on each rank")


# ---- 12: the attention of one device, cut afterwards.

def sequence_parallel():
    x = torch.arange(8, dtype=torch.float64).view(1, 4, 2) / 4
    y = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    print("one device: outputs", *(f"{number:.4f}" for number in y.flatten()))
    for rank in range(2):
        loss = (y[:, 2 * rank:2 * rank + 2] ** 2).mean()
        print(f"loss of rank {rank} {loss:.6f}")


# ---- 13: each token's expert on one device, without slots.

def moe():
    scales = torch.tensor([2.0, 3], requires_grad=True)
    tokens = torch.tensor([[[3.0, 1], [1, 2], [2, 0], [1, 4]],
                           [[5, 1], [2, 1], [3, 2], [0, 1]]])
    for rank, x in enumerate(tokens):
        weight, expert = x.softmax(-1).max(-1)
        kept = [i for i in range(4) if (expert[:i] == expert[i]).sum() < 2]
        results = scales[expert[kept], None] * x[kept]
        loss = (weight[kept, None] * results).sum()
        loss.backward()
        print(f"loss of rank {rank} {loss:.6f}")
    for expert, gradient in enumerate(scales.grad):
        print(f"gradient of expert {expert} {gradient:.6f}")


# ---- 14: DeepSpeed's numbering.

def hybrid_3d():
    from deepspeed.runtime.pipe import topology as deepspeed
    plane = deepspeed.PipeDataParallelTopology(num_pp=2, num_dp=2)
    cube = deepspeed.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    for each in plane, cube, cube:
        show_groups("dp groups", each.get_axis_comm_lists("data"))
        show_groups("pp groups", each.get_axis_comm_lists("pipe"))
        if each is cube:
            show_groups("tp groups", each.get_axis_comm_lists("model"))


# ---- 15: gpt2's layers with random weights. A CPU has no fused AdamW.

CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


def engine():
    on_ranks(2, initialize)


def initialize(rank):
    import deepspeed
    import transformers
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    made, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG,
        training_data=[torch.zeros(8, dtype=torch.long)] * 32)
    if rank == 0:
        numbers = sum(each.numel() for each in model.parameters())
        own = sum(x.numel() for x in optimizer.single_partition_of_fp32_groups)
        name = str(next(model.parameters()).dtype).replace("torch.float", "f")
        print(f"2 ranks, {numbers} parameters in {name}")
        print(f"engine ZeRO-{made.zero_optimization_stage()}, "
              f"{made.train_micro_batch_size_per_gpu()} of "
              f"{made.train_batch_size()} samples on each rank, loss scale "
              f"{optimizer.loss_scale:g}")
        print(f"optimizer {type(optimizer.optimizer).__name__}, rate "
              f"{optimizer.param_groups[0]['lr']}, {own} elements on each rank")
        print(f"loader {len(loader)} micro-batches")
        print(f"scheduler {'none' if scheduler is None else 'one'}")
