#!/usr/bin/env bash
# The gradient through torch.distributed.nn.functional.all_reduce.
#
# One would guess: it makes a row-parallel layer: the sum of the ranks' products
# is that of one device, and so are the gradients.
# What happens: backward adds up the ranks' gradients as well. Each rank has
# computed the same loss, so all gradients in front of the all-reduce are as many
# times too large as there are ranks; all_gather does the same. The functional
# collectives of torch.compile agree. Megatron-LM's own functions let the gradient
# through as it is.
# Version: torch 2.15.0, Gloo, two processes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/backward.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x, weight = torch.randn(2, 8), torch.randn(3, 8)

whole = weight.clone().requires_grad_()
(x @ whole.t()).pow(2).sum().backward()

def row_parallel(all_reduce):
    """A rank's gradient over that of one device, and whether losses agree."""
    own = slice(4 * rank, 4 * rank + 4)
    part = weight[:, own].clone().requires_grad_()
    loss = all_reduce(x[:, own] @ part.t()).pow(2).sum()
    loss.backward()
    one = (x @ weight.t()).pow(2).sum()
    ratios = part.grad / whole.grad[:, own]
    return (round(ratios.min().item(), 3), round(ratios.max().item(), 3),
            abs(loss.item() / one.item() - 1) < 1e-5)

found = {"torch.distributed.nn": row_parallel(differentiable.all_reduce),
         "functional collectives": row_parallel(lambda y: functional.all_reduce(
             y, "sum", dist.group.WORLD))}
all_found = [None, None]
dist.all_gather_object(all_found, found)
if rank == 0:
    print("torch", torch.__version__)
    for name in found:
        print(f"{name}: the loss is that of one device, "
              f"gradients are times {[each[name][:2] for each in all_found]}")
dist.destroy_process_group()
sys.exit(not all(value == (2.0, 2.0, True) for each in all_found
                 for value in each.values()))
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$folder/backward.py" || { echo "the behaviour changed"; exit 1; }
