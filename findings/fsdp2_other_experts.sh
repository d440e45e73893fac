#!/usr/bin/env bash
# Experts under FSDP2, where the ranks' tokens visit different ones.
#
# One would guess: an expert's gradient is the average over ranks, and a rank without
# tokens for it adds zero, as under DDP with find_unused_parameters, or backward says
# that ranks disagree.
# What happens: a unit reduces the gradients that a rank has, one after another. Rank
# 0 visits expert 0 and rank 1 expert 1, both of the same size, so their gradients
# are added to each other: half of expert 0's rows and half of expert 1's get them,
# the other halves get none, and nothing says so.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/experts.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, tokens, expert):
        return self.experts[expert](tokens).sum()

dist.init_process_group("gloo")
rank = dist.get_rank()
tokens = torch.tensor([1.0, 10.0]).repeat_interleave(4).view(2, 4)

def rows_of_gradients(wrapped, layer):
    """Each expert's gradient, a number per row; None where it has none."""
    wrapped(tokens[rank:rank + 1], expert=rank).backward()
    own = [expert.weight.grad for expert in layer.experts]
    own = [None if grad is None else
           (grad.to_local() if hasattr(grad, "to_local") else grad)[:, 0].tolist()
           for grad in own]
    both = [None, None]
    dist.all_gather_object(both, own)
    return both

layer = Layer()
ddp = rows_of_gradients(
    DistributedDataParallel(layer, find_unused_parameters=True), layer)
layer = Layer()
fully_shard(layer)
fsdp = rows_of_gradients(layer, layer)
if rank == 0:
    print("torch", torch.__version__)
    print("expert 0 sees a token of 1 on rank 0, expert 1 one of 10 on rank 1")
    print("DDP:   expert 0 ", ddp[0][0], " expert 1 ", ddp[0][1])
    for each in (0, 1):
        print(f"FSDP2: rank {each}'s rows of expert 0 {fsdp[each][0]}, "
              f"of expert 1 {fsdp[each][1]}")
dist.destroy_process_group()
sys.exit(ddp[0] != [[0.5] * 4, [5.0] * 4] or
         fsdp != [[[5.5] * 2, None], [None, [5.5] * 2]])
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/experts.py" || { echo "the behaviour changed"; exit 1; }
