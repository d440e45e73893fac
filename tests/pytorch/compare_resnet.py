"""Compares ResNets of a chapter program with PyTorch's.

    compare_resnet.py build/chapters/00_single_device/ch00_single_device

Weights travel both ways by their names in torchvision, and to transformers'
ResNet, where it is installed, by its own. Compared are the loss, all parameters
and running statistics after some steps on one batch of random images, and
logits in evaluation. Exit status as compare.py's.
"""

import json
import os
import sys
import tempfile

import torch_python

torch_python.require_torch()

import torch
import torch.nn.functional as F

import compare
import gpt
import resnet
import safetensors_file

LR, MOMENTUM = 0.05, 0.9
# Batch norm divides by standard deviations of few values: f32's rounding grows.
TOLERANCE = {"f32": 2e-4, "f64": 1e-10}

# (name, depths, bottleneck, width, labels, image size, batch, dtype)
CASES = [
    ("basic f64", [1, 2], False, 8, 10, 33, 5, "f64"),
    ("bottleneck f64", [1, 1, 2], True, 4, 7, 40, 4, "f64"),
    ("basic f32", [2, 2], False, 16, 10, 48, 6, "f32"),
    ("bottleneck f32", [1, 2, 1], True, 16, 10, 64, 6, "f32"),
    # Wide enough for the algorithms of fast convolutions
    ("wide basic f32", [2, 2], False, 64, 10, 40, 6, "f32"),
]


def train_one_step(model, images, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    loss = F.cross_entropy(model.train()(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def compare_case(case, program, folder, report):
    name, depths, bottleneck, width, labels, size, batch, dtype = case
    config = {
        "model_type": "resnet",
        "depths": depths,
        "layer_type": "bottleneck" if bottleneck else "basic",
        "embedding_size": width,
        "num_labels": labels,
    }
    torch.manual_seed(1)
    model = resnet.ResNet(depths, bottleneck, width, labels).to(gpt.DTYPES[dtype])
    model(torch.randn(4, 3, size, size, dtype=gpt.DTYPES[dtype]))  # statistics
    theirs_file = os.path.join(folder, "theirs.safetensors")
    ours_file = os.path.join(folder, "ours.safetensors")
    logits_file = os.path.join(folder, "logits.safetensors")
    log_file = os.path.join(folder, "log.jsonl")
    # With num_batches_tracked, which the program need not know
    safetensors_file.save(theirs_file, model.state_dict(), {"format": "pt"})
    options = ["--no-check", "--model", json.dumps(config), "--dtype", dtype]
    options += ["--image-size", str(size), "--batch", str(batch), "--steps"]
    program.run(
        [*options, "1", "--load", theirs_file, "--save", ours_file]
        + ["--optimizer", "sgd", "--lr", str(LR), "--momentum", str(MOMENTUM)]
        + ["--logits", logits_file, "--log", log_file]
    )
    results, _ = safetensors_file.load(logits_file)
    images = results["pixel_values"]
    if images.shape != (batch, 3, size, size):
        raise compare.Failed(f"images of shape {list(images.shape)}")
    loss = train_one_step(model, images, results["labels"])
    ours = compare.read_log(log_file)[0]["loss"]
    tolerance = TOLERANCE[dtype]
    report.error(f"loss, {name}", abs(ours - loss) / loss, tolerance)
    saved, _ = safetensors_file.load(ours_file)
    expected = {
        key: value
        for key, value in model.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    if set(saved) != set(expected):
        raise compare.Failed(f"names {sorted(set(saved) ^ set(expected))}")
    error = max(
        compare.relative(saved[key], value) for key, value in expected.items()
    )
    report.error(f"parameters and statistics, {name}", error, tolerance)
    model.load_state_dict(saved, strict=False)
    with torch.no_grad():
        theirs = model.eval()(images)
    error = compare.relative(results["logits"], theirs)
    report.error(f"logits, {name}", error, tolerance)

    # The same weights under the names of transformers, there and back
    renamed_file = os.path.join(folder, "renamed.safetensors")
    program.run(
        [*options, "0", "--load", ours_file, "--save", renamed_file]
        + ["--save-names", "transformers"]
    )
    program.run([*options, "0", "--load", renamed_file, "--save", ours_file])
    again, _ = safetensors_file.load(ours_file)
    same = all(torch.equal(again[key], value) for key, value in saved.items())
    report.line(f"names of transformers, {name}", same, "the same weights")
    compare.compare_with_transformers(
        name,
        "ResNetForImageClassification",
        renamed_file,
        images,
        results["logits"],
        tolerance,
        report,
    )


def main():
    if len(sys.argv) < 2:
        print("name the program to compare", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    report = compare.Report()
    program = compare.Program(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="shardbook-") as folder:
        for case in CASES:
            try:
                compare_case(case, program, folder, report)
            except (compare.Failed, KeyError, OSError, ValueError) as error:
                report.line(case[0], False, str(error))
    print(f"{report.passed} passed, {report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
