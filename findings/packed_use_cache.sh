#!/usr/bin/env bash
# Sequences packed into one row, told apart by their positions.
#
# One would guess: position_ids that begin again at 0 either keep two sequences apart or
# do not; use_cache changes how fast the next token comes, and no logits.
# What happens: with use_cache=False, the second sequence has the logits that it has
# alone. With the default, which training uses as well unless it is told otherwise, a
# cache is made, positions are not looked at, and its tokens attend to the first
# sequence; with an attention_mask of ones too.
# Version: transformers 5.24.0, torch 2.15.0, attention "sdpa" and "eager".
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 \
  transformers==5.24.0 numpy

cat >"$folder/packed.py" <<'PYTHON'
import sys
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, bos_token_id=0, eos_token_id=0))
first, second = torch.randint(0, 64, (1, 5)), torch.randint(0, 64, (1, 7))
packed = torch.cat([first, second], 1)
positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
print("transformers", transformers.__version__)
failed = False
for attention in ("sdpa", "eager"):
    model.set_attn_implementation(attention)
    for training in (False, True):
        model.train(training)
        alone = model(second).logits
        apart = {}
        for name, options in {
                "use_cache=False": {"use_cache": False}, "default": {},
                "use_cache=False, mask of ones": {
                    "use_cache": False, "attention_mask": torch.ones_like(packed)},
        }.items():
            logits = model(packed, position_ids=positions, **options).logits
            apart[name] = torch.allclose(logits[:, 5:], alone, atol=1e-5)
        print(attention, "training" if training else "evaluation", apart)
        failed |= list(apart.values()) != [True, False, False]
sys.exit(failed)
PYTHON

"$folder/venv/bin/python" "$folder/packed.py" ||
  { echo "the behaviour changed"; exit 1; }
