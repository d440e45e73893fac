#!/usr/bin/env bash
# torch.distributed.checkpoint and what each rank has of its own.
#
# One would guess: each rank gets back what it saved, or the names clash and save
# says so: a generator's state, or how far a rank has read its data.
# What happens: a plain tensor or number is taken for a copy that all ranks share.
# One rank writes it, and all load that. To share the work, it is another rank for
# the next name: a state comes back with parts of several ranks. DTensors come back
# as they were.
# Version: torch 2.15.0, Gloo, three processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/own.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(rank)
checkpoint.save({"read": torch.tensor([100 + rank]), "samples": 100 + rank,
                 "generator": generator.get_state()}, checkpoint_id=sys.argv[1])
state = {"read": torch.zeros(1, dtype=torch.int64), "samples": 0,
         "generator": torch.empty_like(generator.get_state())}
checkpoint.load(state, checkpoint_id=sys.argv[1])
same = torch.equal(state["generator"], generator.get_state())
values = [None] * 3
dist.all_gather_object(values, (state["read"].item(), state["samples"], same))
if rank == 0:
    print("torch", torch.__version__)
    print("saved on ranks 0, 1 and 2: 100, 101 and 102")
    print("a tensor comes back as", [value[0] for value in values])
    print("a number comes back as", [value[1] for value in values])
    print("a generator has its state again:", [value[2] for value in values])
dist.destroy_process_group()
tensors, numbers, states = (list(row) for row in zip(*values))
writers = {tensors[0] - 100, numbers[0] - 100, states.index(True)}
sys.exit(not (len(set(tensors)) == len(set(numbers)) == sum(states) == 1 and
              len(writers) > 1))
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 3 \
  "$folder/own.py" "$folder/checkpoint" || { echo "the behaviour changed"; exit 1; }
