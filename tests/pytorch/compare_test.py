"""Tests the comparison itself: it accepts a right program, no wrong one.

The program is replay.py, called in this process, right or with one mistake
that is easily made. Nothing is built or started.
"""

import functools
import json
import math
import os
import sys
import tempfile
import unittest
from unittest import mock

import torch_python

torch_python.require_torch()

import torch
import torch.nn.functional as F

import compare
import gpt
import replay
import safetensors_file


class ReplayProgram:
    """replay.py as the program under test, with a mistake while it runs."""

    def __init__(self, *mistakes):
        self.mistakes = mistakes

    def run(self, options):
        try:
            for mistake in self.mistakes:
                mistake.start()
            replay.main(options)
        finally:
            for mistake in self.mistakes:
                mistake.stop()


def verdict(name, *mistakes):
    """(passed, failed) of the comparisons called `name`."""
    report = compare.Report()
    with mock.patch("builtins.print"):
        compare.run_all(ReplayProgram(*mistakes), report, only=name)
    return report.passed, report.failed


def optimizer_that_spares_biases(
    name, parameters, lr, weight_decay=0.0, momentum=0.0, make=gpt.make_optimizer
):
    every = list(parameters)
    flat = [p for p in every if p.dim() == 1]
    wide = [p for p in every if p.dim() > 1]
    optimizer = make(name, wide, lr, weight_decay, momentum)
    optimizer.add_param_group({"params": flat, "weight_decay": 0.0})
    return optimizer


def drops_last_batch(self, step, size, batch=gpt.Tokens.batch):
    """Drops the incomplete last batch instead of wrapping."""
    # 61 samples make 12 whole batches of 5.
    return batch(self, step % (self.num_samples // size), size)


def same_targets(self, step, size, batch=gpt.Tokens.batch):
    inputs, _ = batch(self, step, size)
    return inputs, inputs


ODD_F32, ODD_F64 = "training, odd sizes f32", "training, odd sizes f64"
SGD = "training, sgd momentum f32"
# By mistake: the comparison that must fail, and what is wrong meanwhile.
MISTAKES = {
    # The two forms of GELU agree to 1e-5 on a young model's small activations:
    # only double precision tells them apart.
    "exact GELU": (ODD_F64, gpt.Mlp, "activation", staticmethod(F.gelu)),
    "exact GELU in the logits": (
        "logits, adamw f64", gpt.Mlp, "activation", staticmethod(F.gelu)
    ),
    "another epsilon": (
        ODD_F64, F, "layer_norm",
        lambda x, shape, weight, bias, eps, norm=F.layer_norm: norm(
            x, shape, weight, bias, 1e-6
        ),
    ),
    "an output gradient that is not tied": (
        ODD_F32, F, "linear",
        lambda x, weight, linear=F.linear: linear(x, weight.detach()),
    ),
    "future tokens": (
        ODD_F32, torch.Tensor, "masked_fill", lambda self, mask, value: self
    ),
    "coupled decay in AdamW": (
        "training, adamw decay f64", torch.optim, "AdamW", torch.optim.Adam
    ),
    "decoupled decay in Adam": (
        "training, adam decay f64", torch.optim, "Adam", torch.optim.AdamW
    ),
    "decay that spares biases": (
        "training, adamw decay f64", gpt, "make_optimizer",
        optimizer_that_spares_biases,
    ),
    "dampened momentum": (
        SGD, torch.optim, "SGD",
        functools.partial(torch.optim.SGD, dampening=0.9),
    ),
    "Nesterov's momentum": (
        SGD, torch.optim, "SGD",
        functools.partial(torch.optim.SGD, nesterov=True),
    ),
    "a summed loss": (
        SGD, F, "cross_entropy",
        functools.partial(F.cross_entropy, reduction="sum"),
    ),
    "other samples after the end": (
        "training, wrapping f64", gpt.Tokens, "batch", drops_last_batch
    ),
    "targets of the same position": (
        ODD_F32, gpt.Tokens, "batch", same_targets
    ),
}


class ComparisonTest(unittest.TestCase):
    def accepts(self, name):
        passed, failed = verdict(name)
        self.assertGreater(passed, 0)
        self.assertEqual(failed, 0)

    def rejects(self, name, target, attribute, wrong):
        _, failed = verdict(name, mock.patch.object(target, attribute, wrong))
        self.assertGreater(failed, 0)

    def test_right_program_passes(self):
        self.accepts("training, odd sizes f64")
        self.accepts("training, wrapping f64")
        self.accepts("logits, adamw f32")

    def test_wrong_programs_fail(self):
        for mistake, (name, target, attribute, wrong) in MISTAKES.items():
            with self.subTest(mistake):
                self.rejects(name, target, attribute, wrong)

    def test_missing_program_output_fails(self):
        self.rejects("training, odd sizes f32", gpt, "train", lambda *_: [])
        self.rejects("logits, adamw f32", gpt, "save", lambda *_: None)

    def test_nan_fails(self):
        report = compare.Report()
        with mock.patch("builtins.print"):
            report.error("nan", math.nan, 1.0)
        self.assertEqual((report.passed, report.failed), (0, 1))

    def test_program_that_exits_with_an_error_fails(self):
        wrong = compare.Program(
            [sys.executable, "-c", "raise SystemExit('no')"]
        )
        with self.assertRaisesRegex(compare.Failed, "exit status 1: no"):
            wrong.run([])


class SafetensorsFileTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="shardbook-")
        self.addCleanup(self.folder.cleanup)
        self.path = os.path.join(self.folder.name, "a.safetensors")

    def test_every_dtype_survives(self):
        tensors = {
            name: torch.arange(6).reshape(2, 3).to(dtype)
            for name, dtype in safetensors_file.DTYPES.items()
        }
        tensors["empty"] = torch.empty(0, 4)
        tensors["scalar"] = torch.tensor(2.5)
        tensors["transposed"] = torch.arange(6.0).reshape(2, 3).t()
        safetensors_file.save(self.path, tensors, {"format": "pt"})
        loaded, metadata = safetensors_file.load(self.path)
        self.assertEqual(metadata, {"format": "pt"})
        self.assertEqual(list(loaded), list(tensors))
        for name, tensor in tensors.items():
            self.assertEqual(loaded[name].dtype, tensor.dtype)
            self.assertTrue(torch.equal(loaded[name], tensor), name)

    def test_the_package_reads_the_file_and_writes_ours(self):
        try:
            from safetensors.torch import load_file, save_file
        except ImportError as error:
            self.skipTest(str(error))
        tensors = {"a": torch.randn(3, 5), "b": torch.arange(7)}
        safetensors_file.save(self.path, tensors, {"format": "pt"})
        self.assertTrue(torch.equal(load_file(self.path)["a"], tensors["a"]))
        save_file(tensors, self.path, {"key": "value"})
        loaded, metadata = safetensors_file.load(self.path)
        self.assertEqual(metadata, {"key": "value"})
        self.assertTrue(torch.equal(loaded["b"], tensors["b"]))

    def test_truncated_file_raises(self):
        safetensors_file.save(self.path, {"a": torch.randn(3, 5)}, {})
        with open(self.path, "rb") as file:
            content = file.read()
        for size in (0, 7, 20, len(content) - 1):
            with open(self.path, "wb") as file:
                file.write(content[:size])
            with self.assertRaises(ValueError):
                safetensors_file.load(self.path)

    def test_model_loads_with_and_without_the_prefix(self):
        model = gpt.Gpt(
            gpt.config(n_embd=8, n_layer=1, n_head=2, n_positions=4)
        )
        gpt.save(self.path, model)
        prefixed, metadata = safetensors_file.load(self.path)
        self.assertIn("transformer.h.0.attn.c_attn.weight", prefixed)
        bare = os.path.join(self.folder.name, "bare.safetensors")
        safetensors_file.save(bare, model.state_dict(), metadata)
        self.assertEqual(json.loads(metadata["config"])["n_embd"], 8)
        for path in (self.path, bare):
            loaded = gpt.load(path).float()
            for name, value in model.state_dict().items():
                self.assertTrue(torch.equal(loaded.state_dict()[name], value))


if __name__ == "__main__":
    torch.set_num_threads(1)
    # As short as the wrapping case allows: its thirteenth batch wraps.
    compare.STEPS = 13
    unittest.main(verbosity=1)
