#!/usr/bin/env bash
# torch.distributed.checkpoint.state_dict.get_state_dict before the first step.
#
# One would guess: to ask for the state changes no training.
# What happens: an optimizer without state takes a step with gradients of 0 and a
# rate of 0, so that there is a state to save. Weights stay, and the step is counted:
# the first real step is Adam's second. Its moments are corrected as the second's
# are, so it is 0.74 times as long. SGD with dampening begins with a momentum of 0
# instead of the first gradient. A run that saves its start, or loads a checkpoint of
# weights into such a state, ends elsewhere.
# Version: torch 2.15.0, one process.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/steps.py" <<'PYTHON'
import sys
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

def first_step(make_optimizer, saved):
    """How far the first step moves a weight, and steps counted after it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
    optimizer = make_optimizer(model.parameters())
    before = model.weight.detach().clone()
    if saved:
        get_state_dict(model, optimizer)
        assert torch.equal(before, model.weight)
    x = torch.randn(8, 4, dtype=torch.float64)
    model(x).pow(2).sum().backward()
    optimizer.step()
    return (model.weight - before).abs().mean().item()

optimizers = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "SGD with momentum 0.9": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "SGD with momentum 0.9 and dampening 0.9": lambda p: torch.optim.SGD(
        p, lr=0.01, momentum=0.9, dampening=0.9),
}
ratios = {name: round(first_step(make, True) / first_step(make, False), 2)
          for name, make in optimizers.items()}
print("torch", torch.__version__)
for name, ratio in ratios.items():
    print(f"{name}: the first step after get_state_dict is {ratio} times as long")
sys.exit(list(ratios.values()) != [0.74, 1.0, 0.1])
PYTHON

"$folder/venv/bin/python" "$folder/steps.py" ||
  { echo "the behaviour changed"; exit 1; }
