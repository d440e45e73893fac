#!/usr/bin/env bash
# A batch norm under torch.utils.checkpoint.
#
# One would guess: recomputation changes memory and time, and no number.
# What happens: forward runs twice, and so do the updates of the running mean and
# variance: after each step they are 19% of the way to the batch's, with a momentum of
# 0.1. Training is as without, and evaluation is not. Both values of use_reentrant do
# this.
# Version: torch 2.15.0, one process.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/norm.py" <<'PYTHON'
import sys
import torch
from torch.utils.checkpoint import checkpoint

def after_one_step(run):
    """The running mean over the batch's, updates counted, and the gradient."""
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(4)
    x = torch.randn(64, 4).add(5).requires_grad_()
    run(norm, x).pow(3).sum().backward()
    share = norm.running_mean / x.detach().mean(0)
    return (round(share.mean().item(), 2), norm.num_batches_tracked.item(),
            norm.weight.grad)

plain = after_one_step(lambda norm, x: norm(x))
print("torch", torch.__version__)
print("plain:", plain[:2])
failed = plain[:2] != (0.1, 1)
for reentrant in (False, True):
    recomputed = after_one_step(
        lambda norm, x: checkpoint(norm, x, use_reentrant=reentrant))
    print(f"recomputed, use_reentrant {reentrant}:", recomputed[:2])
    failed |= recomputed[:2] != (0.19, 2)
    failed |= not torch.equal(recomputed[2], plain[2])
sys.exit(failed)
PYTHON

"$folder/venv/bin/python" "$folder/norm.py" ||
  { echo "the behaviour changed"; exit 1; }
