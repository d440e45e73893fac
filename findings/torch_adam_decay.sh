#!/usr/bin/env bash
# The weight decay that "torch_adam" brings along.
#
# One would guess: {"type": "Adam", "params": {"torch_adam": true}} chooses another
# program for the same update; without "weight_decay", nothing decays.
# What happens: DeepSpeed creates torch.optim.AdamW, whose weight decay is 0.01.
# Without "torch_adam" it is 0. With "adam_w_mode": false, it is 0 in both.
# Version: deepspeed 0.19.8, torch 2.15.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
install() { "$folder/venv/bin/pip" install --quiet "$@"; }
install torch==2.15.0 numpy==2.4.6 setuptools==84.2.1 wheel==0.48.0 \
  pydantic==2.14.4 ninja==1.13.2 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 \
  packaging==26.4 psutil==7.2.2 py-cpuinfo==9.0.0 tqdm==4.70.1
DS_BUILD_OPS=0 install --no-build-isolation deepspeed==0.19.8
cd "$folder"
DS_ACCELERATOR=cpu "$folder/venv/bin/python" - <<'END'
import inspect
import logging

import deepspeed
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.engine import DeepSpeedEngine

logging.disable(logging.CRITICAL)


class OnDevice:
    """The engine's part that chooses a class, without offload."""

    def zero_use_cpu_optimizer(self):
        return False


def decay(torch_adam, adam_w_mode):
    created, _ = DeepSpeedEngine.get_optimizer_configuration(
        OnDevice(), {"torch_adam": torch_adam}, adam_w_mode)
    default = inspect.signature(created).parameters["weight_decay"].default
    return f"{created.__module__.split('.')[0]} {created.__name__}", default


found = [decay(*each) for each in ((False, True), (True, True), (True, False))]
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for text, (name, default) in zip(
        ("Adam", "Adam, torch_adam", "Adam, torch_adam, adam_w_mode false"),
        found):
    print(f"{text}: {name}, weight decay {default}")
assert FusedAdam
raise SystemExit([default for _, default in found] != [0, 0.01, 0])
END
