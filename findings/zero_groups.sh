#!/usr/bin/env bash
# ZeroRedundancyOptimizer with groups of parameters.
#
# One would guess: it takes the groups that the optimizer itself takes, such as
# {"params": model.base.parameters(), "lr": 0.01} of the documents of torch.optim.
# What happens: parameters() is an iterator. It is read for a check, and is empty when
# the optimizer is made from it: every group has no parameters, no weight moves, and
# nothing says so. With list(model.base.parameters()), weights are those of AdamW.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/groups.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo")

def moved(make_optimizer, in_group):
    """Largest change of each of the two layers in one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer = make_optimizer([
        {"params": in_group(model[0].parameters()), "lr": 0.01},
        {"params": in_group(model[1].parameters()), "lr": 0.05}])
    before = [layer.weight.detach().clone() for layer in model]
    model(torch.ones(8, 4)).pow(2).mean().backward()
    optimizer.step()
    return [round((layer.weight - weight).abs().max().item(), 2)
            for layer, weight in zip(model, before)]

def zero(groups):
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01)

found = {"AdamW": moved(torch.optim.AdamW, iter),
         "ZeroRedundancyOptimizer, parameters()": moved(zero, iter),
         "ZeroRedundancyOptimizer, list(parameters())": moved(zero, list)}
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    for name, changes in found.items():
        print(f"{name}: the layers move by {changes}")
dist.destroy_process_group()
sys.exit(list(found.values()) != [[0.01, 0.05], [0.0, 0.0], [0.01, 0.05]])
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/groups.py" || { echo "the behaviour changed"; exit 1; }
