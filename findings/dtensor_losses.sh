#!/usr/bin/env bash
# Losses of PyTorch between two sharded DTensors.
#
# One would guess: a loss and its gradient are those of one device, as they are for
# (x - y).pow(2).mean().
# What happens: mse_loss, huber_loss, smooth_l1_loss and binary_cross_entropy have
# the right value, and a gradient as many times too large as there are ranks; that
# of l1_loss and of binary_cross_entropy_with_logits is right. Where the rows do not
# divide by the ranks, the value is the mean of the ranks' means, and the gradient
# is off by another factor on each rank.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/losses.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
losses = {
    "(x - y).pow(2).mean()": lambda x, y: (x - y).pow(2).mean(),
    "l1_loss": F.l1_loss,
    "binary_cross_entropy_with_logits":
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "mse_loss": F.mse_loss,
    "huber_loss": F.huber_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "binary_cross_entropy":
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
}

def against_one_device(loss, rows):
    """The value and the gradients, over those of one device."""
    torch.manual_seed(1)
    x, y = torch.randn(rows, 6), torch.randn(rows, 6)
    one = x.clone().requires_grad_()
    value = loss(one, y)
    value.backward()
    sharded = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    of_shards = loss(sharded, distribute_tensor(y, mesh, [Shard(0)]))
    of_shards.backward()
    factor = sharded.grad.full_tensor() / one.grad
    factor = factor[factor.isfinite()]
    return [round(number.item(), 2) for number in
            (of_shards.full_tensor() / value, factor.min(), factor.max())]

found = {name: against_one_device(loss, 8) for name, loss in losses.items()}
uneven = against_one_device(F.mse_loss, 5)
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    for name, (value, least, most) in found.items():
        print(f"{name}: value times {value}, gradient times {least} to {most}")
    value, least, most = uneven
    print(f"mse_loss of 5 rows: value times {value}, "
          f"gradient times {least} to {most}")
dist.destroy_process_group()
right, twice = [1.0, 1.0, 1.0], [1.0, 2.0, 2.0]
sys.exit(list(found.values()) != 3 * [right] + 4 * [twice] or
         uneven[0] == 1.0 or uneven[1:] != [1.67, 2.5])
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/losses.py" || { echo "the behaviour changed"; exit 1; }
