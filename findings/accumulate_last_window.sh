#!/usr/bin/env bash
# Accelerator.accumulate at the end of the data.
#
# One would guess: a step has the mean of the gradients of its batches.
# What happens: each loss is divided by gradient_accumulation_steps, and the last
# batch of the data always ends a step. Of 6 batches in windows of 4, the second step
# has two batches, and half their mean: with SGD it is half as long.
# Version: accelerate 1.15.0, torch 2.15.0, one process.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 \
  accelerate==1.15.0 numpy

cat >"$folder/window.py" <<'PYTHON'
import sys
import accelerate
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(rows, batch_size=2))

# The loss is linear in the weight, so its gradient is the mean of the rows.
window, factors = [], []
for batch in loader:
    with accelerator.accumulate(model):
        window.append(batch)
        accelerator.backward(model(batch).mean())
        if accelerator.sync_gradients:
            mean = torch.cat(window).mean(0)
            factors.append((len(window),
                            round((model.weight.grad[0] / mean).mean().item(), 3)))
            window = []
        optimizer.step()
        optimizer.zero_grad()
print("accelerate", accelerate.__version__)
for batches, factor in factors:
    print(f"a step of {batches} batches: {factor} times the mean of their gradients")
sys.exit(factors != [(4, 1.0), (2, 0.5)])
PYTHON

"$folder/venv/bin/python" "$folder/window.py" ||
  { echo "the behaviour changed"; exit 1; }
