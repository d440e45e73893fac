#!/usr/bin/env bash
# Weights that are changed after deepspeed.initialize, in fp32.
#
# One would guess: training goes on from the new weights; only in 16 bits is there
# a copy that would have to change as well.
# What happens: under ZeRO the optimizer has a copy of its part in fp32, too. The next
# step writes it over the change: weights that are clipped, averaged, pruned, or loaded
# into the module come back as if nothing had been done. Without ZeRO, they stay.
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

cat >"$folder/zero_edited_weights.py" <<'PYTHON'
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

def after_edit(stage):
    """A weight set to 5, and one step of 0.1 later."""
    model = Sums()
    engine = initialize(model, stage)
    layer = model.layers[0]
    start = first(layer, stage)
    whole = (deepspeed.zero.GatheredParameters([layer.weight], modifier_rank=0)
             if stage == 3 else contextlib.nullcontext())
    with whole, torch.no_grad():
        layer.weight.fill_(5)
    edited = first(layer, stage)
    engine.backward(engine([0]))
    engine.step()
    end = first(layer, stage)
    return edited, "kept" if abs(end - 4.9) < 1e-6 else (
        "undone" if abs(end - (start - 0.1)) < 1e-6 else "else")

found = {stage: after_edit(stage) for stage in (0, 1, 2, 3)}
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for stage, (edited, outcome) in found.items():
    print(f"ZeRO-{stage}: the weight is {edited} after the change, "
          f"which the next step has {outcome}")
sys.exit(list(found.values()) != [(5.0, "kept")] + 3 * [(5.0, "undone")])
PYTHON

cd "$folder"
export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$folder/extensions"
export CUDA_VISIBLE_DEVICES= RANK=0 WORLD_SIZE=1 LOCAL_RANK=0
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29542 PATH="$folder/venv/bin:$PATH"
python zero_edited_weights.py || { echo "the behaviour changed"; exit 1; }
