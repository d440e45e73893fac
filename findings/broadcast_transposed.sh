#!/usr/bin/env bash
# torch.distributed.broadcast and a transposed tensor, over Gloo.
#
# One would guess: the other ranks get the tensor, element [i, j] in place [i, j],
# as all_gather gives it; or broadcast refuses it, as send does.
# What happens: Gloo sends memory in its own order and looks at no strides. Where
# the receiver's tensor of the same shape is not transposed, the values arrive in
# other places, without a word. all_reduce adds up other places in the same way.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/transposed.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

def start():
    """[[0, 2], [1, 3]] on rank 0, where it is a transposed view; 0 on rank 1."""
    x = torch.arange(4.0).view(2, 2).t()
    return x if rank == 0 else torch.zeros(2, 2)

def of_both(x):
    both = [None, None]
    dist.all_gather_object(both, x.tolist())
    return both

x = start()
dist.broadcast(x, 0)
broadcast = of_both(x)
x = start()
dist.all_reduce(x)
all_reduce = of_both(x)
gathered = [torch.zeros(2, 2) for _ in range(2)]
dist.all_gather(gathered, start())
error = ""
try:
    if rank == 0:
        dist.send(start(), 1)
except RuntimeError as raised:
    error = str(raised)
if rank == 0:
    print("torch", torch.__version__)
    print("broadcast from rank 0, ranks 0 and 1:", *broadcast)
    print("all_reduce with zeros, ranks 0 and 1:", *all_reduce)
    print("all_gather, the part of rank 0:", gathered[0].tolist())
    print("send:", error or "no error")
dist.barrier()
dist.destroy_process_group()
right, wrong = [[0.0, 2.0], [1.0, 3.0]], [[0.0, 1.0], [2.0, 3.0]]
same = (broadcast == all_reduce == [right, wrong]
        and gathered[0].tolist() == right
        and (rank != 0 or "contiguous" in error))
sys.exit(0 if same else 1)
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/transposed.py" || { echo "the behaviour changed"; exit 1; }
