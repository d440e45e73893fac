#!/usr/bin/env bash
# An optimizer's step inside of backward, under PyTorch's DDP and FSDP2.
#
# One would guess: a hook that register_post_accumulate_grad_hook adds sees the
# gradient that the optimizer would see, so a step in it saves memory under DDP, too.
# What happens: under DDP, hooks run before the ranks' gradients are averaged. Each
# rank steps with its own gradients, without a word, and the copies drift apart.
# Under FSDP2, hooks run behind the reduction, and weights are those of a step after
# backward.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/run.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
samples = torch.randn(3, 2, generator=torch.Generator().manual_seed(rank))

def weights(wrap, inside):
    """Of both ranks, after two steps of SGD."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
    model = wrap(model)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        if inside:
            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        model(samples).pow(2).sum().backward()
        for parameter in model.parameters():
            if not inside:
                step(parameter)
    both = [None, None]
    dist.all_gather_object(both, [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).tolist()
        for p in model.parameters()])
    return both

after = weights(DistributedDataParallel, False)
ddp = weights(DistributedDataParallel, True)
sharded = weights(fully_shard, True), weights(fully_shard, False)
seen = {"DDP, after backward": after[0] == after[1],
        "DDP, inside of backward": ddp[0] == ddp[1],
        "FSDP2, inside as after": sharded[0] == sharded[1]}
if rank == 0:
    print("torch", torch.__version__)
    for name, equal in seen.items():
        print(f"{name}: equal weights: {equal}")
dist.destroy_process_group()
sys.exit(list(seen.values()) != [True, False, True])
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/run.py" || { echo "the behaviour changed"; exit 1; }
