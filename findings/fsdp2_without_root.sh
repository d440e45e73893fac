#!/usr/bin/env bash
# PyTorch's fully_shard on some layers, and not on the model itself.
#
# One would guess: the other parameters are averaged as under DDP, or the first
# forward says that nobody looks after them.
# What happens: their gradients stay on their ranks, without a word, and the copies
# drift apart. fully_shard(model) behind the layers looks after the rest.
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

dist.init_process_group("gloo")
rank = dist.get_rank()
samples = torch.randn(3, 2, generator=torch.Generator().manual_seed(rank))

def has_equal_weights(with_root):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
    fully_shard(model[0])
    if with_root:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(samples).pow(2).sum().backward()
    optimizer.step()
    last = model[1].weight
    both = [None, None]
    dist.all_gather_object(both, (
        last.full_tensor() if with_root else last).tolist())
    return both[0] == both[1]

seen = has_equal_weights(False), has_equal_weights(True)
if rank == 0:
    print("torch", torch.__version__)
    print("the last layer is equal on both ranks after a step:", seen[0])
    print("the same with fully_shard(model):", seen[1])
dist.destroy_process_group()
sys.exit(seen != (False, True))
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/run.py" || { echo "the behaviour changed"; exit 1; }
