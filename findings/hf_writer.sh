#!/usr/bin/env bash
# HuggingFaceStorageWriter of torch.distributed.checkpoint, for a sharded model.
#
# One would guess: it writes the whole model in Hugging Face's format, or each rank's
# part with what is needed to join them.
# What happens: all ranks write one file of the same name. It ends with the shards of
# one rank, and the others' are nowhere. Saving says nothing; loading reports sizes
# that do not match, when the model is gone. With save_distributed=True each rank has
# a file of its own, and with enable_consolidation=True a whole one is made of them.
# Version: torch 2.15.0, safetensors 0.8.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 \
  safetensors==0.8.0 numpy

cat >"$folder/writer.py" <<'PYTHON'
import glob
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 6, bias=False)
fully_shard(model)

def rows_saved(name, **options):
    """The rows of the weight in all files together, whole files apart."""
    path = f"{sys.argv[1]}/{name}"
    dcp.save(model.state_dict(),
             storage_writer=HuggingFaceStorageWriter(path=path, **options))
    dist.barrier()
    files = glob.glob(f"{path}/*.safetensors")
    return len(files), sum(len(load_file(file)["weight"]) for file in files)

found = {"default": rows_saved("default"),
         "save_distributed": rows_saved("shards", save_distributed=True),
         "save_distributed, enable_consolidation": rows_saved(
             "whole", save_distributed=True, enable_consolidation=True)}
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    for name, (files, rows) in found.items():
        print(f"{name}: {files} file(s) with {rows} of 6 rows")
dist.destroy_process_group()
sys.exit(list(found.values()) != [(1, 3), (2, 6), (1, 6)])
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/writer.py" "$folder/saved" || { echo "the behaviour changed"; exit 1; }
