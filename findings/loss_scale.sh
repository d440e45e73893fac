#!/usr/bin/env bash
# The loss scale of DeepSpeed's fp16.
#
# One would guess: with "loss_scale_window" 4 and "hysteresis" 2, the scale
# doubles after 4 good steps, and the first overflow is forgiven.
# What happens: the first time, and after each overflow, the scale doubles after
# 5 good steps. ZeRO forgives the first overflow. Without ZeRO, every overflow
# halves the scale, and no error stops a run at the smallest one.
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
import logging
import math

import deepspeed
import torch
from deepspeed.runtime.fp16 import loss_scaler, unfused_optimizer

logging.disable(logging.CRITICAL)
loss_scaler.dist.get_rank = lambda: 0  # for messages
args = {"init_scale": 256, "scale_window": 4, "min_scale": 1,
        "delayed_shift": 2, "consecutive_hysteresis": False}


def with_zero(overflows):
    scaler = loss_scaler.DynamicLossScaler(**args)
    for overflow in overflows:
        scaler.update_scale(overflow)
        yield int(math.log2(scaler.cur_scale))


def without_zero(overflows):
    holder = type("Optimizer", (), {})()
    holder.verbose = False
    holder.loss_scale_config = loss_scaler.LossScaleConfig(
        torch.float16, True, None, args)
    for overflow in overflows:
        unfused_optimizer.FP16_UnfusedOptimizer._update_scale(holder, overflow)
        yield int(math.log2(holder.loss_scale_config.cur_scale))


good, mixed = [False] * 9, [False, True, False, True, True]
found = {name: [list(scales(each)) for each in (good, mixed)]
         for name, scales in (("with ZeRO", with_zero),
                              ("without ZeRO", without_zero))}
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for name, (of_good, of_mixed) in found.items():
    print(f"{name}: log2 of the scale from 8 on, in 9 good steps {of_good}, "
          f"with overflows in steps 2, 4 and 5 {of_mixed}")
expected = {"with ZeRO": [[8, 8, 8, 8, 9, 9, 9, 9, 10], [8, 8, 8, 7, 6]],
            "without ZeRO": [[8, 8, 8, 8, 9, 9, 9, 9, 10], [8, 7, 7, 6, 5]]}
raise SystemExit(found != expected)
END
