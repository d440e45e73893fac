#!/usr/bin/env bash
# The step that training in 16 bits takes before its first one.
#
# One would guess: initialize changes no weight, and the first step is Adam's step
# 1, as for the same model in fp32.
# What happens: in bf16 and fp16 without ZeRO, initialize calls the optimizer's
# step with gradients of 0. Weight decay is applied once, and the first real step
# is Adam's step 2: its bias corrections make it 0.74 times as long. In fp32, and
# with ZeRO, no such step is taken.
# Version: deepspeed 0.19.8, torch 2.15.0; needs a C++ compiler and ninja.
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
export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$folder/extensions" CUDA_VISIBLE_DEVICES=
export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29533
PATH="$folder/venv/bin:$PATH" python - <<'END'
import logging

import deepspeed
import torch

logging.disable(logging.CRITICAL)


def train(stage, is_bf16, lr=0.01, decay=0.5):
    """The weight after initialize, and the length of the first step."""
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_batch_size": 1, "gradient_clipping": 0,
        "bf16": {"enabled": is_bf16}, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {
            "torch_adam": True, "lr": lr, "weight_decay": decay}}})[0]
    optimizer = engine.basic_optimizer

    def weight():  # in f32, the first of a flat shard
        return optimizer.param_groups[0]["params"][0].detach().flatten()[0].item()

    before = weight()
    x = torch.ones(1, 1, dtype=torch.bfloat16 if is_bf16 else torch.float32)
    engine.backward(engine(x).float().sum())
    engine.step()
    length = (before * (1 - lr * decay) - weight()) / lr
    return round(before, 4), round(length, 2)


found = {name: train(*each) for name, each in
         {"fp32": (0, False), "bf16": (0, True), "bf16, ZeRO-1": (1, True)}.items()}
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for name, (before, length) in found.items():
    print(f"{name}: the weight 1 is {before} after initialize; the first step "
          f"is {length} learning rates long")
raise SystemExit(found != {"fp32": (1, 1), "bf16": (0.995, 0.74),
                           "bf16, ZeRO-1": (1, 1)})
END
