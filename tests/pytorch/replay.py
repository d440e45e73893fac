"""Replays a run of a chapter program in PyTorch, with the same options.

    python3 tests/pytorch/replay.py --load init.safetensors --data TEXT \\
        --batch 8 --seq 32 --steps 20 --optimizer adamw --lr 1e-3 --log L.jsonl

Start from a --load file to replay exactly: initial weights drawn here come from
PyTorch's generator, those of the book from its own.
"""

import argparse
import json
import sys

import torch

import gpt
import safetensors_file

def parse(arguments):
    """The options that a replay understands, as the chapters spell them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt-nano")
    parser.add_argument("--dtype", default="f32", choices=sorted(gpt.DTYPES))
    parser.add_argument("--data", required=True)
    parser.add_argument(
        "--optimizer", default="adamw", choices=["sgd", "adam", "adamw"]
    )
    numbers = {"steps": 20, "batch": 8, "seq": 32, "seed": 0}
    numbers.update({"lr": 1e-3, "momentum": 0.0, "weight-decay": 0.0})
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    # Accepted, so that a chapter's command line fits as it is.
    parser.add_argument("--no-check", action="store_true")
    for name in ("--load", "--save", "--log", "--logits"):
        parser.add_argument(name, metavar="FILE")
    return parser.parse_args(arguments)


def initial_model(options):
    """The model of --load, or of --model with weights from --seed."""
    if options.load:
        return gpt.load(options.load)
    torch.manual_seed(options.seed)
    if options.model in gpt.MODELS:
        return gpt.Gpt(gpt.MODELS[options.model])
    with open(options.model, encoding="utf-8") as file:
        return gpt.Gpt(json.load(file))


def main(arguments):
    options = parse(arguments)
    model = initial_model(options).to(gpt.DTYPES[options.dtype])
    tokens = gpt.Tokens(options.data, options.seq)
    optimizer = gpt.make_optimizer(
        options.optimizer,
        model.parameters(),
        lr=options.lr,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
    )
    log = gpt.train(model, tokens, options.steps, options.batch, optimizer)
    if options.log:
        with open(options.log, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in log)
    if options.save:
        gpt.save(options.save, model)
    if options.logits:
        ids, _ = tokens.batch(0, options.batch)
        with torch.no_grad():
            result = {"input_ids": ids, "logits": model(ids)}
        safetensors_file.save(options.logits, result, {"format": "pt"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
