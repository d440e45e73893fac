#!/usr/bin/env bash
# PyTorch's DTensor and random numbers on a CPU.
#
# One would guess: a sharded tensor gets what one device would draw, or at least
# each rank draws numbers of its own.
# What happens: every rank draws its shard from its own generator. With the same
# seed on all ranks, all shards are equal: rows of a weight repeat, after FSDP2's
# start from the meta device as well, and dropout drops the same places of every
# shard. A warning says that support may not be complete. With different seeds,
# copies of a replicated tensor differ.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/random.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

def on_both(tensor):
    values = [None, None]
    dist.all_gather_object(values, tensor.detach().flatten().tolist())
    return values

torch.manual_seed(0)
sharded = distribute_tensor(torch.empty(4, 2), mesh, [Shard(0)])
shards = on_both(torch.nn.init.normal_(sharded).to_local())

with torch.device("meta"):
    layer = torch.nn.Linear(2, 4, bias=False)
fully_shard(layer)
layer.to_empty(device="cpu")
torch.manual_seed(0)
layer.reset_parameters()
weights = on_both(layer.weight.to_local())

ones = distribute_tensor(torch.ones(16), mesh, [Shard(0)])
dropped = on_both(torch.nn.functional.dropout(ones, 0.5).to_local())

torch.manual_seed(rank)
whole = distribute_tensor(torch.empty(2, 2), mesh, [Replicate()])
copies = on_both(torch.nn.init.normal_(whole).to_local())

if rank == 0:
    print("torch", torch.__version__)
    for name, values in [("normal_, sharded", shards), ("FSDP2's weight", weights),
                         ("dropout", dropped), ("replicated, other seeds", copies)]:
        print(f"{name}: the ranks have", "equal" if values[0] == values[1]
              else "different", "numbers")
dist.destroy_process_group()
sys.exit(not (shards[0] == shards[1] and weights[0] == weights[1] and
              dropped[0] == dropped[1] and copies[0] != copies[1]))
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/random.py" || { echo "the behaviour changed"; exit 1; }
