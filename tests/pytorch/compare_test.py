"""Tests the comparison itself: it accepts a right program, no wrong one.

The program is replay.py, called in this process, right or with one mistake
that is easily made. Nothing is built or started.
"""

import json
import math
import os
import sys
import tempfile
import unittest
from unittest import mock

import torch_python

REASON = torch_python.ensure_torch()
if REASON:
    print(f"SKIPPED: {REASON}")
    sys.exit(77)

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

    # The two forms of GELU agree to 1e-5 on a young model's small activations:
    # only double precision tells them apart.
    def test_exact_gelu_fails(self):
        self.rejects(
            "training, odd sizes f64",
            gpt.Mlp,
            "activation",
            staticmethod(F.gelu),
        )

    def test_exact_gelu_fails_in_the_logits(self):
        self.rejects(
            "logits, adamw f64", gpt.Mlp, "activation", staticmethod(F.gelu)
        )

    def test_other_epsilon_fails(self):
        layer_norm = F.layer_norm

        def wrong(x, shape, weight, bias, eps):
            return layer_norm(x, shape, weight, bias, 1e-6)

        self.rejects("training, odd sizes f64", F, "layer_norm", wrong)

    def test_untied_output_gradient_fails(self):
        linear = F.linear

        def wrong(x, weight):
            return linear(x, weight.detach())

        self.rejects("training, odd sizes f32", F, "linear", wrong)

    def test_future_tokens_fail(self):
        self.rejects(
            "training, odd sizes f32",
            torch.Tensor,
            "masked_fill",
            lambda self, mask, value: self,
        )

    def test_coupled_decay_in_adamw_fails(self):
        self.rejects(
            "training, adamw decay f64", torch.optim, "AdamW", torch.optim.Adam
        )

    def test_decoupled_decay_in_adam_fails(self):
        self.rejects(
            "training, adam decay f64", torch.optim, "Adam", torch.optim.AdamW
        )

    def test_decay_that_spares_biases_fails(self):
        make = gpt.make_optimizer

        def wrong(name, parameters, lr, weight_decay=0.0, momentum=0.0):
            every = list(parameters)
            flat = [p for p in every if p.dim() == 1]
            wide = [p for p in every if p.dim() > 1]
            optimizer = make(name, wide, lr, weight_decay, momentum)
            optimizer.add_param_group({"params": flat, "weight_decay": 0.0})
            return optimizer

        self.rejects("training, adamw decay f64", gpt, "make_optimizer", wrong)

    def test_dampened_momentum_fails(self):
        sgd = torch.optim.SGD

        def wrong(parameters, **options):
            return sgd(parameters, dampening=0.9, **options)

        self.rejects("training, sgd momentum f32", torch.optim, "SGD", wrong)

    def test_nesterov_momentum_fails(self):
        sgd = torch.optim.SGD

        def wrong(parameters, **options):
            return sgd(parameters, nesterov=True, **options)

        self.rejects("training, sgd momentum f32", torch.optim, "SGD", wrong)

    def test_summed_loss_fails(self):
        cross_entropy = F.cross_entropy

        def wrong(logits, targets):
            return cross_entropy(logits, targets, reduction="sum")

        self.rejects("training, sgd momentum f32", F, "cross_entropy", wrong)

    def test_other_samples_after_the_end_fail(self):
        batch = gpt.Tokens.batch

        def wrong(self, step, size):
            # Drops the incomplete last batch instead of wrapping.
            return batch(self, step % (self.num_samples // size), size)

        # 61 samples make 12 whole batches of 5.
        self.rejects("training, wrapping f64", gpt.Tokens, "batch", wrong)

    def test_targets_of_the_same_position_fail(self):
        batch = gpt.Tokens.batch

        def wrong(self, step, size):
            inputs, _ = batch(self, step, size)
            return inputs, inputs

        self.rejects("training, odd sizes f32", gpt.Tokens, "batch", wrong)

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
