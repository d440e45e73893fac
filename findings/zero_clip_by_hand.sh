#!/usr/bin/env bash
# torch.nn.utils.clip_grad_norm_ between backward and step, under DeepSpeed's ZeRO.
#
# One would guess: it clips the gradients of the step, as without ZeRO, or says that
# there are none.
# What happens: gradients lie in DeepSpeed's buffers and no parameter has one, so the
# norm is 0 and nothing is clipped. The key gradient_clipping clips.
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

cat >"$folder/zero_clip_by_hand.py" <<'PYTHON'
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

def clipped(stage):
    """The norm that clip_grad_norm_ finds, and how far the step moves a weight."""
    model = Sums()
    engine = initialize(model, stage)
    before = first(model.layers[0], stage)
    engine.backward(engine([0]))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5).item()
    engine.step()
    return round(norm, 3), round(before - first(model.layers[0], stage), 3)

# The gradient is 1 in each of four elements: a norm of 2, clipped to 0.25 each.
found = {stage: clipped(stage) for stage in range(4)}
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for stage, (norm, distance) in found.items():
    print(f"ZeRO-{stage}: clip_grad_norm_ returns {norm}, the weight moves by "
          f"{distance}")
sys.exit(list(found.values()) != [(2.0, 0.025)] + 3 * [(0.0, 0.1)])
PYTHON

cd "$folder"
export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$folder/extensions"
export CUDA_VISIBLE_DEVICES= RANK=0 WORLD_SIZE=1 LOCAL_RANK=0
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29545 PATH="$folder/venv/bin:$PATH"
python zero_clip_by_hand.py || { echo "the behaviour changed"; exit 1; }
