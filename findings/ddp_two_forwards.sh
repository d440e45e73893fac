#!/usr/bin/env bash
# Two forwards of one DDP, and then two backwards.
#
# One would guess: both gradients are averaged, as after forward, backward, forward,
# backward; or the second backward is an error.
# What happens: the first backward is averaged. The second, over the other forward,
# leaves its gradients on this rank, without a word. The sum of both losses, with one
# backward, is averaged.
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
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(rank)
first, second = (torch.randn(3, 2, generator=generator) for _ in range(2))

def gradients_are_equal(run):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    run(model)
    both = [None, None]
    dist.all_gather_object(both, model.module.weight.grad.tolist())
    return both[0] == both[1]

def loss(model, samples):
    return model(samples).pow(2).sum()

def in_turn(model):
    loss(model, first).backward()
    loss(model, second).backward()

def forwards_first(model):
    losses = [loss(model, first), loss(model, second)]
    for each in losses:
        each.backward()

def one_sum(model):
    (loss(model, first) + loss(model, second)).backward()

seen = [gradients_are_equal(run) for run in (in_turn, forwards_first, one_sum)]
if rank == 0:
    print("torch", torch.__version__)
    print("the ranks have equal gradients after forward, backward, twice:", seen[0])
    print("after two forwards, two backwards:", seen[1])
    print("after two forwards, one backward of the sum:", seen[2])
dist.destroy_process_group()
sys.exit(seen != [True, False, True])
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/run.py" || { echo "the behaviour changed"; exit 1; }
