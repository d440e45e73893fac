#!/usr/bin/env bash
# Two steps of a PyTorch pipeline's schedule before one update.
#
# One would guess: gradients of both batches add up, as after two calls of backward.
# What happens: each step ends with a division of all gradients by the number of
# micro-batches, those of the step before as well. With 4 micro-batches, the first
# batch counts a quarter. With scale_grads=False nothing is divided.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/steps.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()

def accumulated(schedule_class, batches, **options):
    """The gradient of a bias of the last stage, whose true one is 1 per batch."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(2, 2)
    schedule = schedule_class(
        PipelineStage(layer, rank, 2, torch.device("cpu")), n_microbatches=4,
        loss_fn=lambda y, target: (y - target).sum(1).mean(), **options)
    for _ in range(batches):
        schedule.step(*([torch.ones(8, 2)] if rank == 0 else []),
                      **({} if rank == 0 else {"target": torch.zeros(8, 2)}))
    return round(layer.bias.grad[0].item(), 3)

found = {schedule.__name__: [accumulated(schedule, batches) for batches in (1, 2)]
         for schedule in (ScheduleGPipe, Schedule1F1B)}
undivided = accumulated(Schedule1F1B, 2, scale_grads=False) / 4
if rank == 1:
    print("torch", torch.__version__)
    for name, gradients in found.items():
        print(f"{name}: gradients after one and two batches {gradients}")
    print("Schedule1F1B, scale_grads=False, divided by 4 once:", undivided)
dist.destroy_process_group()
sys.exit(rank == 1 and
         (list(found.values()) != 2 * [[1.0, 1.25]] or undivided != 2.0))
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/steps.py" || { echo "the behaviour changed"; exit 1; }
