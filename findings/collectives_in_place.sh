#!/usr/bin/env bash
# Collectives that change a tensor that backward needs.
#
# One would guess: backward raises an error, "modified by an inplace operation",
# as after h.mul_(2): all_reduce, broadcast and recv work in place.
# What happens: they do not raise the tensor's version, which backward compares.
# It takes the new values as if they were the old ones; gradients are wrong. After
# recv there is no word, after the others a warning about kernels of autograd.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/in_place.py" <<'PYTHON'
import sys
import warnings
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

def gradient(change):
    """Of (2 w)^2 at w = 1, which is 8, where `change` follows the square."""
    w = torch.ones(1, requires_grad=True)
    h = 2 * w
    y = h * h
    change(h)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            y.sum().backward()
        except RuntimeError as error:
            return "an error", str(error).partition(": ")[0][-32:]
    return w.grad.item(), "a warning" if caught else "no word"

def message(h):
    if rank == 0:
        dist.recv(h, 1)
    else:
        dist.send(torch.full((1,), 100.0), 0)

# Warnings of one kind come once: recv goes first
seen = {"recv of 100": gradient(message),
        "all_reduce": gradient(dist.all_reduce),
        "mul_(2)": gradient(lambda h: h.mul_(2))}
if rank == 0:
    print("torch", torch.__version__)
    for name, (value, word) in seen.items():
        print(f"the gradient, 8, after {name}: {value}; {word}")
dist.barrier()
dist.destroy_process_group()
same = rank != 0 or (seen["recv of 100"] == (400.0, "no word")
                     and seen["all_reduce"][0] == 16.0
                     and "inplace operation" in seen["mul_(2)"][1])
sys.exit(0 if same else 1)
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/in_place.py" || { echo "the behaviour changed"; exit 1; }
