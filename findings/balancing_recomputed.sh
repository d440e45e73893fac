#!/usr/bin/env bash
# The balancing loss of a Mixtral or Qwen3-MoE under recomputation.
#
# One would guess: gradient checkpointing changes memory and time, and no gradient.
# What happens: with "use_reentrant": True, blocks run first without gradients, and
# the scores of the routers that the balancing loss needs are kept from that run.
# The loss has the same value, and its gradient reaches no router. With
# "use_reentrant": False, gradients are as without checkpointing.
# Version: transformers 5.24.0, torch 2.15.0.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 \
  transformers==5.24.0 numpy

cat >"$folder/routers.py" <<'PYTHON'
import copy
import sys
import torch
import transformers
from transformers import (MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig,
                          Qwen3MoeForCausalLM)

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             output_router_logits=True, use_cache=False)
configs = [(MixtralForCausalLM, MixtralConfig(**sizes, num_local_experts=4)),
           (Qwen3MoeForCausalLM, Qwen3MoeConfig(
               **sizes, head_dim=8, num_experts=4, num_experts_per_tok=2,
               moe_intermediate_size=16))]
ids = torch.arange(16).reshape(2, 8) * 7 % 64
print("transformers", transformers.__version__, "torch", torch.__version__)
as_seen = True
for model_class, config in configs:
    torch.manual_seed(0)
    start = model_class(config).train()
    losses, norms = [], []
    for reentrant in (None, False, True):
        model = copy.deepcopy(start)
        if reentrant is not None:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        loss = model(ids).aux_loss       # the balancing loss alone
        losses.append(loss.item())
        routers = [p for name, p in model.named_parameters()
                   if name.endswith("gate.weight")]
        if loss.requires_grad:
            loss.backward()
        norms.append([0.0 if p.grad is None else round(p.grad.norm().item(), 6)
                      for p in routers])
    print(model_class.__name__)
    for name, loss, norm in zip(("no checkpointing", "use_reentrant False",
                                 "use_reentrant True"), losses, norms):
        print(f"  {name}: loss {loss:.4f}, gradients of routers {norm}")
    as_seen &= (losses[0] == losses[1] == losses[2] and norms[0] == norms[1] and
                all(norms[0]) and not any(norms[2]))
sys.exit(not as_seen)
PYTHON

OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/routers.py" ||
  { echo "the behaviour changed"; exit 1; }
