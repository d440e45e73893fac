#!/usr/bin/env bash
# The rates of DeepSpeed's warm-ups.
#
# One would guess: a warm-up ends at the optimizer's rate, WarmupLR as WarmupDecayLR,
# and "warmup_type": "Linear" is linear, or an error.
# What happens: without "warmup_max_lr", WarmupLR ends at the optimizer's rate, but
# WarmupDecayLR at 0.001, whatever the optimizer's rate is. A "warmup_type" that is
# neither "log" nor "linear" is a warning in the log, and the warm-up is
# logarithmic: "Linear" as well.
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

import deepspeed
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR

logging.disable(logging.CRITICAL)


def rates(schedule, **params):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.04)
    scheduler = schedule(optimizer, warmup_num_steps=4, **params)
    found = []
    for _ in range(6):
        found.append(round(optimizer.param_groups[0]["lr"], 6))
        scheduler.step()
    return found


found = {"WarmupLR, linear": rates(WarmupLR, warmup_type="linear"),
         "WarmupLR, Linear": rates(WarmupLR, warmup_type="Linear"),
         "WarmupDecayLR, linear": rates(WarmupDecayLR, warmup_type="linear",
                                        total_num_steps=8)}
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for name, each in found.items():
    print(f"{name}, the optimizer's rate 0.04: {each}")
raise SystemExit(list(found.values()) != [[0, 0, 0.01, 0.02, 0.03, 0.04],
                                          [0, 0, 0.02, 0.031699, 0.04, 0.04],
                                          [0, 0, 0.00025, 0.0005, 0.00075, 0.001]])
END
