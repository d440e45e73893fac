"""Compares a chapter program with PyTorch: weights, logits, losses.

    compare.py build/chapters/00_single_device/ch00_single_device
    compare.py --only 'adamw f64' PROGRAM [ARGUMENTS...]

One line for each comparison. Exit status: 0 all hold, 1 one fails, 2 bad input,
77 skipped, because no Python with torch was found.
"""

import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import typing

import torch_python

torch_python.require_torch()

import torch

import gpt
import safetensors_file

ROOT = os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
)
STEPS, BATCH, SEQ = 20, 8, 32
RUN_TIMEOUT_S = 300

# Three heads of 16, a sequence and a batch that no vector width divides: the
# remainders that a kernel handles last have their turn here.
ODD_MODEL = gpt.config(n_embd=48, n_layer=3, n_head=3, n_positions=40)

# f32: 20 steps of float arithmetic in another order. f64 leaves no room for a
# wrong formula to hide in.
LOSS_TOLERANCE = {"f32": 1e-4, "f64": 1e-9}
LOGITS_TOLERANCE = {"f32": 1e-5, "f64": 1e-12}
PARAMETER_TOLERANCE_F64 = 1e-8


class Case(typing.NamedTuple):
    """One training run, done twice."""

    name: str
    dtype: str
    optimizer: str
    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    model: str = "gpt-nano"
    batch: int = BATCH
    seq: int = SEQ
    data_bytes: int = 60000

    def options(self, work):
        """The command line of this case, but for what it loads and saves."""
        # PyTorch is the yardstick here, not the chapter's own.
        options = ["--no-check", "--model", self.model, "--dtype", self.dtype]
        options += ["--data", work.data(self.data_bytes)]
        options += ["--batch", str(self.batch), "--seq", str(self.seq)]
        options += ["--optimizer", self.optimizer, "--lr", repr(self.lr)]
        options += ["--weight-decay", repr(self.weight_decay)]
        if self.optimizer == "sgd":
            options += ["--momentum", repr(self.momentum)]
        return options


def cases(odd_model, exact_model=""):
    """The runs to compare; the files hold ODD_MODEL, and it with exact GELU."""
    odd = {"model": odd_model, "batch": 5, "seq": 33}
    exact = {**odd, "model": exact_model}
    return [
        Case("adamw f32", "f32", "adamw", 1e-3),
        Case("adamw decay f32", "f32", "adamw", 1e-3, weight_decay=0.1),
        Case("adam decay f32", "f32", "adam", 1e-3, weight_decay=0.1),
        Case("sgd momentum f32", "f32", "sgd", 0.05, momentum=0.9),
        Case("adamw f64", "f64", "adamw", 1e-3),
        Case("adamw decay f64", "f64", "adamw", 1e-3, weight_decay=0.1),
        Case("adam decay f64", "f64", "adam", 1e-3, weight_decay=0.1),
        Case(
            "sgd momentum decay f64",
            "f64",
            "sgd",
            0.05,
            momentum=0.9,
            weight_decay=0.1,
        ),
        Case("odd sizes f32", "f32", "adamw", 1e-3, **odd),
        Case("odd sizes f64", "f64", "adamw", 1e-3, **odd),
        Case("exact gelu f64", "f64", "adamw", 1e-3, **exact),
        # 2040 bytes are 61 samples; 20 steps ask for 100, and one batch wraps.
        Case("wrapping f64", "f64", "adamw", 1e-3, data_bytes=2040, **odd),
    ]


class Failed(Exception):
    """The program did not do its part of a comparison."""


class Program:
    """A chapter program, started with options."""

    def __init__(self, command):
        self.command = command

    def run(self, options):
        """Returns the output; raises Failed with the program's last words."""
        try:
            done = subprocess.run(
                [*self.command, *options],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=RUN_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"no end after {RUN_TIMEOUT_S} s") from None
        except OSError as error:
            raise Failed(str(error)) from None
        if done.returncode != 0:
            words = (done.stderr.strip() or done.stdout.strip()).split("\n")
            raise Failed(f"exit status {done.returncode}: {words[-1]}")
        return done.stdout


class Work:
    """The folder of one comparison run, and the text that both sides read."""

    def __init__(self, folder):
        self.folder = folder

    def path(self, name):
        return os.path.join(self.folder, name)

    def data(self, size):
        """A file with the first `size` bytes of the book's pages."""
        path = self.path(f"text-{size}")  # bytes: cut anywhere
        if not os.path.exists(path):
            pages = sorted(
                glob.glob(os.path.join(ROOT, "chapters/*/README.md"))
            )
            pages += [os.path.join(ROOT, "LICENSE"), os.path.abspath(__file__)]
            content = b""
            for page in pages:
                with open(page, "rb") as file:
                    content += file.read()
            while len(content) < size:
                content += content
            with open(path, "wb") as file:
                file.write(content[:size])
        return path

    def model(self, name, **changes):
        """The path of ODD_MODEL as a file, with changes."""
        path = self.path(name)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**ODD_MODEL, **changes}, file)
        return path


class Report:
    """Prints a line for each comparison and counts them."""

    def __init__(self):
        self.passed = self.failed = 0

    def line(self, name, holds, text):
        if holds:
            self.passed += 1
        else:
            self.failed += 1
        print(
            f"{'passed' if holds else 'FAILED'}  {name:<40} {text}", flush=True
        )

    def error(self, name, value, tolerance):
        # `not >` would let a NaN pass.
        holds = value <= tolerance
        self.line(name, holds, f"{value:.2e}, allowed {tolerance:.0e}")


def relative(ours, theirs):
    """The largest difference over the largest value, as tensors go."""
    if ours.shape != theirs.shape:
        raise Failed(f"shape {list(ours.shape)}, expected {list(theirs.shape)}")
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def worst_ratio(ours, theirs):
    """The largest relative difference of two lists of numbers."""
    if len(ours) != len(theirs):
        raise Failed(f"{len(ours)} values, expected {len(theirs)}")
    if any(value is None or value != value for value in ours):
        raise Failed("a value is missing or not a number")
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs))


def read_log(path):
    """The objects of a --log file."""
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise Failed(f"--log: {error}") from None


def load_model(path):
    """The model of a file that the program saved."""
    try:
        return gpt.load(path)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise Failed(f"{os.path.basename(path)}: {error}") from None


def compare_with_transformers(
    name, kind, path, inputs, ours, tolerance, report
):
    """Logits of a file, as transformers' class `kind` reads it."""
    name = f"logits in transformers, {name}"
    try:
        import transformers
    except ImportError as error:
        print(f"SKIPPED {name:<40} {error}", flush=True)
        return
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    _, metadata = safetensors_file.load(path)
    with tempfile.TemporaryDirectory(prefix="shardbook-") as folder:
        shutil.copy(path, os.path.join(folder, "model.safetensors"))
        config = os.path.join(folder, "config.json")
        with open(config, "w", encoding="utf-8") as file:
            file.write(metadata["config"])
        model, info = getattr(transformers, kind).from_pretrained(
            folder, output_loading_info=True
        )
    strangers = set(info["missing_keys"]) - {"lm_head.weight"}
    strangers |= set(info["unexpected_keys"])
    if strangers:
        raise Failed("transformers: missing or unknown " + ", ".join(strangers))
    with torch.no_grad():
        theirs = model.to(ours.dtype).eval()(inputs).logits
    report.error(name, relative(ours, theirs), tolerance)


def check_rows_are_text(ids, data, seq):
    """Raises Failed unless each row of ids is a sample of the data."""
    with open(data, "rb") as file:
        content = file.read()
    samples = {content[i : i + seq] for i in range(0, len(content) - seq, seq)}
    for row in ids.tolist():
        if min(row) < 0 or max(row) > 255 or bytes(row) not in samples:
            raise Failed("--logits: input_ids are no sample of the data")


def without_key_bias(model):
    """Zeroes the keys' biases: softmax cancels them, so they learn only noise.

    With decay inside Adam's gradient the noise grows 10^4 times a step.
    """
    with torch.no_grad():
        for block in model.h:
            bias = block.attn.c_attn.bias
            bias[bias.numel() // 3 : 2 * bias.numel() // 3] = 0


def compare_logits(case, program, work, report):
    """A model saved after training gives the program's own logits here."""
    saved, logits_file = work.path("trained.safetensors"), work.path("logits")
    program.run(
        case.options(work)
        + ["--steps", str(STEPS), "--save", saved, "--logits", logits_file]
    )
    try:
        logits, _ = safetensors_file.load(logits_file)
        ids, ours = logits["input_ids"].long(), logits["logits"]
    except (OSError, ValueError, KeyError) as error:
        raise Failed(f"--logits: {error}") from None
    check_rows_are_text(ids, work.data(case.data_bytes), case.seq)
    tolerance = LOGITS_TOLERANCE[case.dtype]
    with torch.no_grad():
        theirs = load_model(saved).to(gpt.DTYPES[case.dtype])(ids)
    report.error(f"logits, {case.name}", relative(ours, theirs), tolerance)
    compare_with_transformers(
        case.name, "GPT2LMHeadModel", saved, ids, ours, tolerance, report
    )


def compare_training(case, program, work, report):
    """Twenty steps from the same file give the same losses and norms."""
    init, log_file = work.path("init.safetensors"), work.path("log.jsonl")
    final = work.path("final.safetensors")
    program.run(case.options(work) + ["--steps", "0", "--save", init])
    program.run(
        case.options(work)
        + ["--load", init, "--steps", str(STEPS)]
        + ["--log", log_file, "--save", final]
    )
    model = load_model(init).to(gpt.DTYPES[case.dtype])
    optimizer = gpt.make_optimizer(
        case.optimizer,
        model.parameters(),
        lr=case.lr,
        weight_decay=case.weight_decay,
        momentum=case.momentum,
    )
    tokens = gpt.Tokens(work.data(case.data_bytes), case.seq)
    theirs = gpt.train(model, tokens, STEPS, case.batch, optimizer)
    ours = read_log(log_file)
    tolerance = LOSS_TOLERANCE[case.dtype]

    def column(log, key):
        return [line.get(key) for line in log]

    error = worst_ratio(column(ours, "loss"), column(theirs, "loss"))
    report.error(f"losses, {case.name}", error, tolerance)
    if ours[0].get("grad_norm") is not None:
        error = worst_ratio(
            column(ours, "grad_norm"), column(theirs, "grad_norm")
        )
        # Looser: weights that differ move the norm more than the loss.
        report.error(f"gradient norms, {case.name}", error, 10 * tolerance)
    if case.dtype == "f64":
        # In f32, Adam turns gradients that are little but rounding into full
        # steps, whose direction is a matter of the order of summation.
        trained = load_model(final)
        without_key_bias(trained)
        without_key_bias(model)
        trained = trained.state_dict()
        error = max(
            relative(trained[name], value)
            for name, value in model.state_dict().items()
        )
        report.error(f"parameters, {case.name}", error, PARAMETER_TOLERANCE_F64)


def run_all(program, report, only=""):
    """Runs the comparisons whose name contains `only`."""
    with tempfile.TemporaryDirectory(prefix="shardbook-") as folder:
        work = Work(folder)
        todo = [
            (f"training, {case.name}", compare_training, case)
            for case in cases(
                work.model("odd.json"),
                work.model("exact.json", activation_function="gelu"),
            )
        ]
        for case in [cases("")[0], cases("")[4]]:
            todo.insert(0, (f"logits, {case.name}", compare_logits, case))
        for name, compare, case in todo:
            if only not in name:
                continue
            try:
                compare(case, program, work, report)
            except Failed as error:
                report.line(name, False, str(error))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", default="", help="part of a comparison's name"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="the program and its arguments",
    )
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("name the program to compare")
    torch.set_num_threads(1)
    print(f"PyTorch {torch.__version__}, {STEPS} steps each")
    report = Report()
    run_all(Program(arguments.command), report, arguments.only)
    print(f"{report.passed} passed, {report.failed} failed")
    if report.passed + report.failed == 0:
        print(f"--only {arguments.only}: no comparison has this in its name")
        return 2
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
