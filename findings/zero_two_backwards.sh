#!/usr/bin/env bash
# Two losses of one step under DeepSpeed's ZeRO, each with a backward of its own.
#
# One would guess: their gradients add up, as in PyTorch and as without ZeRO.
# What happens: the second backward writes its gradients over the first's, and
# nothing says so. One backward of the sum of both losses is right.
# Version: deepspeed 0.19.8, torch 2.15.0; needs a C++ compiler and ninja.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
install() { "$folder/venv/bin/pip" install --quiet --no-cache-dir "$@"; }
install torch==2.15.0 numpy==2.4.6 setuptools==84.2.1 wheel==0.48.0 \
  pydantic==2.14.4 ninja==1.13.2 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 \
  packaging==26.4 psutil==7.2.2 py-cpuinfo==9.0.0 tqdm==4.70.1
DS_BUILD_OPS=0 install --no-build-isolation deepspeed==0.19.8

cat >"$folder/zero_two_backwards.py" <<'PYTHON'
import contextlib
import logging
import sys
import deepspeed
import torch

logging.disable(logging.CRITICAL)

class Sums(torch.nn.Module):
    """A product with ones for each weight, so that every gradient is 1."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(4, 1, bias=False) for _ in range(2))

    def forward(self, used):
        return sum(self.layers[i](torch.ones(1, 4)).sum() for i in used)

def initialize(model, stage):
    return deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_batch_size": 1, "gradient_clipping": 0,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage}})[0]

def first(layer, stage):
    """The first element of the weight; ZeRO-3 gathers it."""
    whole = (deepspeed.zero.GatheredParameters([layer.weight]) if stage == 3
             else contextlib.nullcontext())
    with whole:
        return layer.weight[0, 0].item()

def moved(stage, separately):
    """How far a step moves a weight whose gradients are 1 and 2."""
    model = Sums()
    engine = initialize(model, stage)
    before = first(model.layers[0], stage)
    losses = engine([0]), 2 * engine([0])
    for loss in losses if separately else [sum(losses)]:
        engine.backward(loss)
    engine.step()
    return round(before - first(model.layers[0], stage), 3)

found = {stage: (moved(stage, False), moved(stage, True)) for stage in range(4)}
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for stage, (together, separately) in found.items():
    print(f"ZeRO-{stage}: one backward of the sum moves the weight by {together}, "
          f"two backwards by {separately}")
sys.exit(list(found.values()) != [(0.3, 0.3)] + 3 * [(0.3, 0.2)])
PYTHON

cd "$folder"
export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$folder/extensions"
export CUDA_VISIBLE_DEVICES= RANK=0 WORLD_SIZE=1 LOCAL_RANK=0
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29543 PATH="$folder/venv/bin:$PATH"
python zero_two_backwards.py || { echo "the behaviour changed"; exit 1; }
