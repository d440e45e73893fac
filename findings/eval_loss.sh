#!/usr/bin/env bash
# The evaluation loss of the Trainer.
#
# One would guess: it is the mean over all tokens, as the loss of training is, and a
# batch size changes the time alone.
# What happens: it is the mean over rows of their batches' means, so that a token in a
# batch of short rows counts more. Of the same model and rows, batches of 1, 2 and 4
# give three losses, and perplexities that are further apart; only one batch of all
# rows gives the mean over tokens.
# Version: transformers 5.24.0, torch 2.15.0, accelerate 1.15.0, one process.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 \
  transformers==5.24.0 accelerate==1.15.0 numpy

cat >"$folder/evaluate.py" <<'PYTHON'
import sys
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, bos_token_id=0, eos_token_id=0))
with torch.no_grad():
    model.lm_head.weight.mul_(60)  # so that losses differ from row to row
rows = [torch.randint(0, 32, (length,)) for length in (2, 3, 40, 4)]

def padded(batch):
    tokens = [row["input_ids"] for row in batch]
    return {"input_ids": pad_sequence(tokens, True, 0),
            "labels": pad_sequence(tokens, True, -100),
            "attention_mask": pad_sequence([torch.ones_like(t) for t in tokens], True)}

def evaluated(batch_size):
    trainer = Trainer(model=model, data_collator=padded,
                      eval_dataset=[{"input_ids": row} for row in rows],
                      args=TrainingArguments(
                          sys.argv[1], per_device_eval_batch_size=batch_size,
                          report_to=[], use_cpu=True, disable_tqdm=True))
    return trainer.evaluate()["eval_loss"]

found = [evaluated(size) for size in (1, 2, 4)]
with torch.no_grad():
    of_tokens = model.eval()(**padded([{"input_ids": row} for row in rows])).loss.item()
print("transformers", transformers.__version__)
print("batches of 1, 2, 4:", *(f"{loss:.3f}" for loss in found))
print(f"mean over tokens: {of_tokens:.3f}")
apart = [abs(loss / of_tokens - 1) for loss in found]
sys.exit(apart[0] < 0.02 or apart[1] < 0.02 or apart[2] > 1e-5)
PYTHON

"$folder/venv/bin/python" "$folder/evaluate.py" "$folder/out" ||
  { echo "the behaviour changed"; exit 1; }
