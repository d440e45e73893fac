#!/usr/bin/env bash
# A parameter that a step does not use, under DeepSpeed's ZeRO-3.
#
# One would guess: it stays where it is, or is updated with a gradient of 0, as
# under ZeRO-1 and ZeRO-2.
# What happens: it is updated with the last gradient that it had, in every step until
# it is used again, and nothing says so. So are the layers for images in a step of
# texts alone.
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

cat >"$folder/zero3_left_out.py" <<'PYTHON'
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

def moved(stage):
    """How far SGD moves the second layer in each of four steps."""
    model = Sums()
    engine = initialize(model, stage)
    distances = []
    for used in ([0], [0, 1], [0], [0]):
        before = first(model.layers[1], stage)
        engine.backward(engine(used))
        engine.step()
        distances.append(round(before - first(model.layers[1], stage), 3))
    return distances

found = {stage: moved(stage) for stage in (0, 1, 2, 3)}
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
print("a layer that only the second of four steps uses moves by")
for stage, distances in found.items():
    print(f"ZeRO-{stage}: {distances}")
once = [0.0, 0.1, 0.0, 0.0]
sys.exit(list(found.values()) != 3 * [once] + [[0.0, 0.1, 0.1, 0.1]])
PYTHON

cd "$folder"
export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$folder/extensions"
export CUDA_VISIBLE_DEVICES= RANK=0 WORLD_SIZE=1 LOCAL_RANK=0
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29541 PATH="$folder/venv/bin:$PATH"
python zero3_left_out.py || { echo "the behaviour changed"; exit 1; }
