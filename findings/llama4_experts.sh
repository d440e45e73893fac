#!/usr/bin/env bash
# The work of a Llama 4's experts in transformers.
#
# One would guess: a token that visits one expert costs as much with 16 experts as
# with 2, as in a Mixtral.
# What happens: Llama 4's layer multiplies every token by every expert, and scales
# the inputs of those that were not chosen by zero. A forward's operations grow with
# the number of experts.
# Version: transformers 5.24.0, torch 2.15.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy \
  transformers==5.24.0
cat >"$folder/counts.py" <<'END'
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (AutoModelForCausalLM, Llama4TextConfig,
                          MixtralConfig)


def operations(config):
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False)
    return counter.get_total_flops()


SIZES = dict(vocab_size=256, hidden_size=256, intermediate_size=512,
             num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, num_experts_per_tok=1)
LLAMA4 = dict(intermediate_size_mlp=512, head_dim=64,
              interleave_moe_layer_step=1)
for kind, more in ((Llama4TextConfig, LLAMA4), (MixtralConfig, {})):
    few, many = (operations(kind(**SIZES, **more, num_local_experts=experts))
                 for experts in (2, 16))
    print(round(many / few, 1))
END
readarray -t ratios < <("$folder/venv/bin/python" "$folder/counts.py" 2>/dev/null)
echo "16 experts instead of 2, one for each token: Llama 4 takes ${ratios[0]} times the operations, Mixtral ${ratios[1]}"
[[ ${ratios[0]} == 4.8 && ${ratios[1]} == 1.0 ]]
