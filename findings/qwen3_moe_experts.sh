#!/usr/bin/env bash
# The number of experts of a Qwen3-MoE, between two versions of transformers.
#
# One would guess: a model that one version saves is the same model in the other.
# What happens: version 5 writes the number of experts as "num_local_experts", a
# name that version 4.57 knows for Mixtral alone. 4.57 passes over it and builds the
# class's default of 128 experts. (Published files say "num_experts", which both
# read.)
# Version: transformers 5.24.0 and 4.57.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.24.0 4.57.6; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "transformers==$version"
done
cd "$folder"
cat >saves.py <<'END'
import json
from transformers import Qwen3MoeConfig

Qwen3MoeConfig(num_experts=8, num_experts_per_tok=2).save_pretrained("model")
with open("model/config.json") as file:
    print(*(key for key in json.load(file) if key.endswith("_experts")))
END
cat >opens.py <<'END'
from transformers import AutoConfig

print(AutoConfig.from_pretrained("model").num_experts)
END
run() { "$1/bin/python" "$2" 2>/dev/null; }
keys=$(run 5.24.0 saves.py)
new=$(run 5.24.0 opens.py)
old=$(run 4.57.6 opens.py)
echo "transformers 5.24.0 saves 8 experts as: $keys"
echo "transformers 5.24.0 opens them as $new, 4.57.6 as $old"
[[ $keys == num_local_experts && $new == 8 && $old == 128 ]]
