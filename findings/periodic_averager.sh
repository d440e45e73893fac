#!/usr/bin/env bash
# PyTorch's PeriodicModelAverager, for local SGD.
#
# One would guess: with period=4, weights are averaged after steps 4, 8 and so on.
# What happens: they are averaged after steps 1, 5, 9. So a run of 8 steps ends with
# copies that differ, and the first average is that of one step. Parameters without a
# gradient at that moment are left out, frozen ones among them.
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
from torch.distributed.algorithms.model_averaging.averagers import (
    PeriodicModelAverager)

dist.init_process_group("gloo")
rank = dist.get_rank()
averager = PeriodicModelAverager(period=4, warmup_steps=0)
weight, frozen = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(
    torch.full((1,), float(rank)), requires_grad=False)
weight.grad = torch.zeros(1)
equal_after = []
for step in range(1, 9):
    with torch.no_grad():
        weight += rank            # each rank walks its own way
    averager.average_parameters([weight, frozen])
    both = [None, None]
    dist.all_gather_object(both, (weight.item(), frozen.item()))
    if both[0][0] == both[1][0]:
        equal_after.append(step)
if rank == 0:
    print("torch", torch.__version__)
    print("after 8 steps, weights were equal after steps", equal_after)
    print("the frozen parameter is", [value[1] for value in both])
dist.destroy_process_group()
sys.exit(equal_after != [1, 5] or both[0][1] == both[1][1])
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/run.py" || { echo "the behaviour changed"; exit 1; }
