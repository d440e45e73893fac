#!/usr/bin/env bash
# PyTorch's DDP and a layer that is frozen first and trained later.
#
# One would guess: DDP averages the gradients of all parameters that train, or says
# that it does not know this one.
# What happens: DDP looks at requires_grad as it is constructed. Gradients of a layer
# that is unfrozen later stay on their ranks, without a word, and the copies drift
# apart. A layer that is frozen later is an error.
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
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2))
model[0].requires_grad_(False)
ddp = DistributedDataParallel(model)
samples = torch.randn(3, 2, generator=torch.Generator().manual_seed(rank))

ddp(samples).pow(2).sum().backward()
model[0].requires_grad_(True)
ddp.zero_grad()
ddp(samples).pow(2).sum().backward()

both = [None, None]
dist.all_gather_object(both, [layer.weight.grad.tolist() for layer in model])
same = [both[0][i] == both[1][i] for i in range(2)]
if rank == 0:
    print("torch", torch.__version__)
    print("the ranks have equal gradients of the unfrozen layer:", same[0])
    print("of the other layer:", same[1])
dist.destroy_process_group()
sys.exit(same != [False, True])
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/run.py" || { echo "the behaviour changed"; exit 1; }
