#!/usr/bin/env bash
# torch.distributed's MAX and a value that is not a number, over Gloo.
#
# One would guess: the maximum is not a number, on every rank, as torch.max has it;
# so a flag or a norm shows an overflow of any rank.
# What happens: the order decides. A NaN of rank 0 reaches both ranks, one of rank 1
# disappears from both.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/maximum.py" <<'PYTHON'
import math
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
seen = []
for rank_of_nan in range(2):
    x = torch.tensor([math.nan if dist.get_rank() == rank_of_nan else 1.0])
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    both = [None, None]
    dist.all_gather_object(both, x.item())
    seen.append(both)
one_process = torch.tensor([1.0, math.nan]).max().item()
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    print("torch.max of 1 and NaN:", one_process)
    for rank, both in enumerate(seen):
        print(f"MAX with the NaN on rank {rank}, ranks 0 and 1:", *both)
dist.barrier()
dist.destroy_process_group()
same = (math.isnan(one_process) and all(map(math.isnan, seen[0]))
        and seen[1] == [1.0, 1.0])
sys.exit(0 if same else 1)
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/maximum.py" || { echo "the behaviour changed"; exit 1; }
