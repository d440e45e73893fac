#!/usr/bin/env bash
# PyTorch's DTensor: item() of a sum over a sharded tensor.
#
# One would guess: the sum of all elements, or an error that asks for
# full_tensor().
# What happens: each rank gets the term of its own shard, without a word. float()
# and print() do the same. So ranks log other losses than the one that they train
# on. full_tensor().item() has the sum.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/item.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])   # 0 to 3, and 4 to 7

def on_both(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values

items = on_both(x.sum().item())
means = on_both(x.mean().item())
wholes = on_both(x.sum().full_tensor().item())
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    print("the sum of 0 to 7 is 28, and lies as", x.sum().placements)
    print("sum().item() on ranks 0 and 1:", items)
    print("mean().item():", means)
    print("sum().full_tensor().item():", wholes)
dist.destroy_process_group()
same = (items == [6.0, 22.0] and means == [1.5, 5.5] and wholes == [28.0, 28.0])
sys.exit(0 if same else 1)
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/item.py" || { echo "the behaviour changed"; exit 1; }
