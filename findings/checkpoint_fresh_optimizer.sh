#!/usr/bin/env bash
# An optimizer that goes on from torch.distributed.checkpoint.
#
# One would guess: dcp.load({"optimizer": optimizer.state_dict()}) brings back what
# dcp.save of the same dictionary has saved, or says what it cannot.
# What happens: load fills what the dictionary has, and a new optimizer has no state.
# Adam's moments and step numbers stay in the file, and nothing says so: the next step
# is a first one, though the learning rate is the saved one. With
# get_state_dict and set_state_dict, or with torch.save, training goes on as it was.
# Version: torch 2.15.0, one process.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy

cat >"$folder/resume.py" <<'PYTHON'
import sys
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

folder = sys.argv[1]

def fresh(lr):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, dtype=torch.float64)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)

def steps(model, optimizer, numbers):
    for number in numbers:
        x = torch.randn(8, 4, dtype=torch.float64,
                        generator=torch.Generator().manual_seed(number))
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def plain(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

model, optimizer = fresh(0.01)
steps(model, optimizer, range(3))
dcp.save(plain(model, optimizer), checkpoint_id=f"{folder}/plain")
by_name = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.save(by_name, checkpoint_id=f"{folder}/by_name")
steps(model, optimizer, range(3, 6))
uninterrupted = model.weight.detach().clone()

found = {}
model, optimizer = fresh(0.5)
state = plain(model, optimizer)
dcp.load(state, checkpoint_id=f"{folder}/plain")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
moments, rate = len(optimizer.state), optimizer.param_groups[0]["lr"]
steps(model, optimizer, range(3, 6))
found["optimizer.state_dict()"] = torch.allclose(model.weight, uninterrupted)

model, optimizer = fresh(0.5)
by_name = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.load(by_name, checkpoint_id=f"{folder}/by_name")
set_state_dict(model, optimizer, model_state_dict=by_name["model"],
               optim_state_dict=by_name["optimizer"])
steps(model, optimizer, range(3, 6))
found["get_state_dict"] = torch.allclose(model.weight, uninterrupted)

print("torch", torch.__version__)
print(f"loaded by optimizer.state_dict(): rate {rate}, moments of {moments} of 2 "
      "parameters")
for name, equal in found.items():
    print(f"{name}: goes on as without the interruption: {equal}")
sys.exit(moments != 0 or rate != 0.01 or list(found.values()) != [False, True])
PYTHON

"$folder/venv/bin/python" "$folder/resume.py" "$folder/saved" ||
  { echo "the behaviour changed"; exit 1; }
