#!/usr/bin/env bash
# PyTorch's DDP and a parameter that forward leaves out.
#
# One would guess: backward raises an error, or DDP averages the gradients of the
# parameters that were used.
# What happens: backward ends without a word, and no gradient is averaged, not
# even of parameters that were used. The error comes with the next forward, so an
# optimizer's step in between makes the replicas differ. With
# find_unused_parameters=True, the gradients are averaged.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/unused.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(1, 1, bias=False)
        self.left_out = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.used(x)

dist.init_process_group("gloo")
x = torch.tensor([[2.0], [4.0]])[dist.get_rank():][:1]   # one sample on each rank

def used_gradients(**options):
    """Of both ranks, and what the next forward says. The mean is 3."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net(), **options)
    model(x).sum().backward()
    gradients = [None, None]
    dist.all_gather_object(gradients, model.module.used.weight.grad.item())
    try:
        model(x)
        error = ""
    except RuntimeError as raised:
        error = str(raised).splitlines()[0][:43]
    return gradients, error

plain, error = used_gradients()
found, no_error = used_gradients(find_unused_parameters=True)
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    print("gradients of the used parameter, ranks 0 and 1:", plain)
    print("the next forward:", error or "no error")
    print("with find_unused_parameters=True:", found, no_error or "no error")
dist.destroy_process_group()
same = (plain == [2.0, 4.0] and error.startswith("Expected to have finished")
        and found == [3.0, 3.0] and not no_error)
sys.exit(0 if same else 1)
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/unused.py" || { echo "the behaviour changed"; exit 1; }
