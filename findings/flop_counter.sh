#!/usr/bin/env bash
# FlopCounterMode, with which people compute how much of a device they use.
#
# One would guess: it counts the operations of matrix products that this rank does,
# and says so where it knows none.
# What happens: under tensor parallelism each rank counts the work of all ranks.
# Backward of a convolution in g groups counts the gradient of the weight as if there
# were no groups, g times too much: 9 forwards instead of 2 with 8 groups. An LSTM, a
# product of a matrix and a vector, and a TransformerEncoderLayer in evaluation count
# as 0, without a word.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/counter.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                               parallelize_module)
from torch.utils.flop_counter import FlopCounterMode

def operations(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()

def backward_over_forward(groups):
    layer = nn.Conv2d(8, 8, 3, groups=groups, bias=False)
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    forward = operations(lambda: layer(x))
    return operations(lambda: layer(x).sum().backward()) / forward - 1

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
x = torch.randn(8, 16)
whole = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
one_device = operations(lambda: whole(x))
parallelize_module(whole, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
block = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
with torch.no_grad():
    found = {
        "a rank of two under tensor parallelism, over one device":
            operations(lambda: whole(x)) / one_device,
        "TransformerEncoderLayer, evaluation over training":
            operations(lambda: block.eval()(x[None])) /
            operations(lambda: block.train()(x[None])),
        "LSTM": operations(lambda: nn.LSTM(16, 16)(x)),
        "matrix times vector": operations(lambda: x @ torch.randn(16)),
    }
for groups in (1, 8):
    found[f"backward over forward, {groups} groups"] = backward_over_forward(groups)
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    for name, value in found.items():
        print(f"{name}: {value:g}")
dist.destroy_process_group()
sys.exit(list(found.values()) != [1, 0, 0, 0, 2, 9])
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/counter.py" || { echo "the behaviour changed"; exit 1; }
