#!/usr/bin/env bash
# torch.distributed.reduce over Gloo: the ranks that do not get the result.
#
# One would guess: their tensors stay as they were; only rank dst receives.
# What happens: they hold sums of some ranks in some places, and which ones depends
# on the number of elements. Whoever reduces a loss to rank 0 for its log, and goes
# on with the tensor on the others, goes on with other numbers.
# Version: torch 2.15.0, Gloo, three processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/reduce.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.full((6,), float(10**rank))
dist.reduce(x, dst=0)
values = [None] * 3
dist.all_gather_object(values, x.tolist())
if rank == 0:
    print("torch", torch.__version__)
    print("the ranks had 1, 10 and 100, and rank 0 gets the sum:")
    for owner, numbers in enumerate(values):
        print(f"rank {owner}:", numbers)
dist.destroy_process_group()
sys.exit(not (values[0] == [111.0] * 6 and values[1] != [10.0] * 6 and
              values[2] != [100.0] * 6))
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 3 \
  "$folder/reduce.py" || { echo "the behaviour changed"; exit 1; }
