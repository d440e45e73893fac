#!/usr/bin/env bash
# One torch.autocast around several steps.
#
# One would guess: each step's forward uses the weights that the step before has
# written, wherever the context begins.
# What happens: a weight is cast once, and the copy serves until the outermost
# context ends. After optimizer.step(), load_state_dict() or any other change in
# place, forward goes on with the old weights: the loss stays the same for ever,
# while the weights move away by the same gradient each step. cache_enabled=False, or
# a context around forward alone, trains.
# Version: torch 2.15.0, one process on a CPU.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/loop.py" <<'PYTHON'
import contextlib
import sys
import torch

def losses(around_loop, around_forward):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 4)
    found = []
    with around_loop():
        for _ in range(5):
            with around_forward():
                y = model(x)
            loss = (y.float() - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(round(loss.item(), 3))
    return found

def autocast(**options):
    return lambda: torch.autocast("cpu", torch.bfloat16, **options)

none = contextlib.nullcontext
found = {"around forward": losses(none, autocast()),
         "around the loop": losses(autocast(), none),
         "around the loop, cache_enabled=False":
             losses(autocast(cache_enabled=False), none)}
print("torch", torch.__version__)
for name, values in found.items():
    print(f"{name}: losses {values}")
right, stale, uncached = found.values()
sys.exit(len(set(stale)) > 1 or right[-1] > right[0] / 2 or uncached != right)
PYTHON

"$folder/venv/bin/python" "$folder/loop.py" ||
  { echo "the behaviour changed"; exit 1; }
