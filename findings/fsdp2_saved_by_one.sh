#!/usr/bin/env bash
# A model under FSDP2 (fully_shard), saved by rank 0 as one saves it under DDP.
#
# One would guess: torch.save(model.state_dict()) on rank 0 writes the whole model,
# or loading it says that parts are missing.
# What happens: the file has rank 0's rows, and says that the shape is the whole
# one. Loaded on all ranks, load_state_dict reports that all keys match, and every
# rank has rank 0's rows: half of the weights are gone. One process without a group
# refuses to load it.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/save.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(2, 4, bias=False)
before = model.weight.detach().clone()
fully_shard(model)
if rank == 0:
    torch.save(model.state_dict(), sys.argv[1])
dist.barrier()

other = torch.nn.Linear(2, 4, bias=False)
fully_shard(other)
answer = other.load_state_dict(torch.load(sys.argv[1]))
after = other.weight.full_tensor()
if rank == 0:
    print("torch", torch.__version__)
    print("load_state_dict:", answer)
    print("saved: ", before.tolist())
    print("loaded:", after.tolist())
dist.destroy_process_group()
sys.exit(not (torch.equal(after[:2], before[:2]) and
              torch.equal(after[2:], before[:2])))
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/save.py" "$folder/model.pt" || { echo "the behaviour changed"; exit 1; }
