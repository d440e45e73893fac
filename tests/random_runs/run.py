#!/usr/bin/env python3
"""Runs the chapters' programs with random options and judges what they do.

    tests/random_runs/run.py --runs 1000            all chapters, on threads,
                                                    processes and shapes
    tests/random_runs/run.py --chapter 05 --seed 7
    tests/random_runs/run.py --only 132             run 132 again

Run i of seed s always draws the same options, whatever else is run. Models
are small and steps few, so a run takes a fraction of a second. A run fails with

    crash        a signal ended it
    hang         it did not end within --limit seconds
    claim        a claim does not hold (exit status 1)
    unpredicted  a claim counts as passed although a count has no prediction
    contradicted a claim counts as passed although its numbers differ
    unmeasured   a claim that could be judged was not
    message      options were refused, but not by one sentence on stderr, with
                 nothing on stdout
    accepted     an impossible option was not refused
    status       another exit status than 0, 1 or 2
    output       no JSON came out

Each failure is printed with its command. Exit status: 0 none, 1 some, 2 bad
input.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = {
    "00": "00_single_device",
    "01": "01_data_parallel",
    "02": "02_ddp",
    "03": "03_zero_fsdp",
    "04": "04_model_parallel",
    "05": "05_gpipe",
    "06": "06_1f1b",
}
# How long a message waits for its receiver depends on who is late, so the
# peak of what waits is counted and not predicted.
LATE_MESSAGES = {"04", "05", "06"}


# --- Drawing options ---------------------------------------------------------


class Draw:
    """The options of one run."""

    def __init__(self, rng, chapter, backends):
        self.rng = rng
        self.chapter = chapter
        self.words = []
        self.impossible = False
        self.draw_shared(backends)
        getattr(self, "draw_" + chapter)()
        if rng.random() < 0.08:
            self.spoil()

    def one_of(self, *values):
        return self.rng.choice(values)

    def sometimes(self, share):
        return self.rng.random() < share

    def give(self, option, value):
        self.words += [option, str(value)]

    def maybe(self, share, option, *values):
        if self.sometimes(share):
            self.give(option, self.one_of(*values))

    def flag(self, share, option):
        """The option, or its opposite: both are said at times."""
        if self.sometimes(share):
            self.words.append(
                option if self.sometimes(0.7) else "--no-" + option[2:])

    def draw_model(self):
        """A language model (True) or one of images."""
        kind = self.one_of("mlp", "gpt", "gpt", "gpt", "gpt", "resnet",
                           "gpt-nano")
        if self.chapter == "04":
            kind = self.one_of("mlp", "resnet", "resnet")
        self.vocab = 256
        self.layers = {"mlp": 4, "gpt-nano": 6}.get(kind, 0)
        if kind == "gpt":
            heads = self.one_of(1, 2, 4)
            blocks = self.rng.randint(1, 7)
            self.layers = blocks + 2
            self.vocab = self.one_of(256, 256, 50)
            config = {
                "model_type": "gpt2",
                "vocab_size": self.vocab,
                "n_positions": 32,
                "n_embd": heads * self.one_of(4, 8, 16),
                "n_layer": blocks,
                "n_head": heads,
            }
        elif kind == "resnet":
            depths = [self.rng.randint(1, 2)
                      for _ in range(self.rng.randint(2, 4))]
            self.layers = sum(depths) + 2
            config = {
                "model_type": "resnet",
                "depths": depths,
                "layer_type": self.one_of("basic", "bottleneck"),
                "embedding_size": self.one_of(4, 8),
                "num_labels": self.one_of(5, 10, 300),
            }
        else:
            self.give("--model", kind)
            return True
        self.give("--model", json.dumps(config, separators=(",", ":")))
        return kind != "resnet"

    def draw_world_size(self):
        self.world_size = {"00": 1, "04": 2}.get(
            self.chapter,
            self.one_of(1, 2, 3, 4) if self.backend == "gloo"
            else self.one_of(1, 2, 2, 3, 4, 4, 6, 8))
        # Mostly a layer for each stage
        if self.chapter in ("05", "06") and self.sometimes(0.9):
            self.world_size = min(self.world_size, self.layers)
        if self.chapter not in ("00", "04"):
            self.give("--world-size", self.world_size)

    def draw_shared(self, backends):
        self.backend = self.one_of(*backends)
        if self.chapter == "00" and self.backend == "gloo":
            self.backend = "threads"
        if self.chapter in ("01", "04") and self.backend == "gloo":
            self.backend = "threads"
        self.give("--backend", self.backend)
        self.is_text = self.draw_model()
        self.draw_world_size()
        if self.is_text:
            self.give("--seq", self.rng.randint(2, 32))
            data = ["random", "book"] if self.vocab == 256 else ["random"]
            self.give("--data", self.one_of(*data))
            if self.layers != 4 or self.sometimes(0.05):
                self.maybe(0.15, "--dropout", 0.1, 0.5)
        else:
            self.give("--image-size", self.one_of(16, 17, 32))
        self.batch = self.rng.randint(1, 30)
        if self.chapter in ("02", "03") and self.sometimes(0.9):
            self.batch = self.world_size * self.rng.randint(1, 4)
        self.give("--batch", self.batch)
        self.give("--steps", self.one_of(0, 1, 1, 2, 2, 3, 4))
        self.give("--seed", self.rng.randint(0, 99))
        self.dtype = self.one_of("f32", "f32", "f32", "f64", "bf16", "f16")
        self.give("--dtype", self.dtype)
        optimizer = self.one_of("sgd", "adam", "adamw")
        self.give("--optimizer", optimizer)
        if optimizer == "sgd" and self.sometimes(0.4):
            self.give("--momentum", 0.9)
            self.flag(0.4, "--nesterov")
        self.maybe(0.2, "--weight-decay", 0.01, 0.1)
        self.maybe(0.2, "--lr", 0.0001, 0.01)
        self.maybe(0.25, "--clip", 0.1, 1, 100)
        self.maybe(0.1, "--lr-schedule", "linear", "cosine")
        self.maybe(0.1, "--warmup", 1, 3)
        clusters = ["dgx-h100"]
        clusters.append("selene" if self.backend == "sim" else "none")
        if self.world_size <= 2 or self.sometimes(0.1):
            clusters.append("kaggle-t4x2")
        self.maybe(0.3, "--cluster", *clusters)
        self.flag(0.2, "--deterministic")
        self.flag(0.1, "--fold")
        self.maybe(0.03, "--device-memory", "64KiB", "1MiB", "1GiB")

    def pieces(self):
        if self.sometimes(0.05):
            return self.batch + self.rng.randint(0, 2)
        return self.rng.randint(1, self.batch)

    def draw_00(self):
        self.maybe(0.6, "--micro-batches", self.pieces())
        self.flag(0.4, "--recompute")
        if self.dtype in ("bf16", "f16"):
            self.flag(0.5, "--master-weights")

    def draw_01(self):
        pass

    def draw_02(self):
        self.maybe(0.6, "--bucket-mb", 0.001, 0.01, 0.1, 1)
        self.maybe(0.5, "--first-bucket-mb", 0.001, 0.01)
        self.flag(0.3, "--find-unused-parameters")
        self.flag(0.3, "--gradient-as-bucket-view")
        self.flag(0.2, "--static-graph")
        self.flag(0.2, "--broadcast-buffers")
        self.maybe(0.3, "--accumulate", 1, 2, 3)
        self.maybe(0.2, "--comm-hook", "bf16", "none")

    def draw_03(self):
        strategy = self.one_of("zero1", "zero2", "zero3", "fsdp", "fsdp2")
        self.give("--strategy", strategy)
        self.maybe(0.3, "--accumulate", 1, 2, 3)
        self.flag(0.3, "--recompute")
        if strategy.startswith("fsdp"):
            self.flag(0.15, "--cpu-offload")
            if strategy == "fsdp":
                self.maybe(0.5, "--sharding-strategy", "full_shard",
                           "shard_grad_op", "no_shard", "hybrid_shard")
            self.maybe(0.2, "--shard-size", 1, 2)
            self.maybe(0.4, "--wrap", "transformer", "size", "none")
            self.maybe(0.3, "--min-num-params", 100, 1000, 10000)
            self.maybe(0.3, "--backward-prefetch", "pre", "post", "none")
            self.flag(0.2, "--forward-prefetch")
            self.flag(0.2, "--limit-all-gathers")
            self.maybe(0.2, "--param-dtype", "bf16", "f32")
            self.maybe(0.2, "--reduce-dtype", "bf16", "f32")
            self.flag(0.2, "--no-sync")
            return
        if strategy != "zero1":
            self.flag(0.2, "--cpu-offload")
        self.maybe(0.4, "--reduce-bucket-size", 100, 1000, 50000)
        self.maybe(0.4, "--allgather-bucket-size", 100, 1000, 50000)
        self.flag(0.3, "--overlap-comm")
        self.flag(0.3, "--reduce-scatter")
        if strategy == "zero3":
            self.maybe(0.7, "--persistence-threshold", 0, 100, 2000)
            self.maybe(0.4, "--prefetch-bucket-size", 0, 1000, 20000)
        else:
            self.flag(0.2, "--round-robin-gradients")

    def draw_04(self):
        self.maybe(0.7, "--variant", "single", "model_parallel", "pipeline")
        self.maybe(0.8, "--split-size", self.pieces())
        self.maybe(0.3, "--loss", "mse", "cross_entropy")
        if self.sometimes(0.05):
            self.give("--sweep", "1,3")
            self.give("--repeats", 1)

    def balance(self):
        """So many layers for each rank, where there are enough."""
        ranks = self.world_size
        if self.layers < ranks:
            return ",".join("1" * ranks)
        cuts = sorted(self.rng.sample(range(1, self.layers), ranks - 1))
        return ",".join(str(b - a) for a, b in
                        zip([0] + cuts, cuts + [self.layers]))

    def draw_05(self):
        self.maybe(0.8, "--micro-batches", self.pieces())
        self.maybe(0.4, "--partition", "uniform", "parameters", "time",
                   self.balance())
        self.maybe(0.6, "--recompute", "always", "except_last", "never")
        self.flag(0.4, "--early-recompute")
        if self.is_text and self.layers != 4:
            self.flag(0.3, "--long-skips")

    def draw_06(self):
        schedule = self.one_of(
            "naive", "gpipe", "1f1b", "1f1b-clocked", "interleaved",
            "interleaved-grouped", "zb-h1", "zb-h2", "dualpipe", "pipedream",
            "pipedream-2bw")
        self.give("--schedule", schedule)
        if schedule != "pipedream":
            self.maybe(0.8, "--micro-batches", self.pieces(), self.world_size,
                       2 * self.world_size)
        if schedule.startswith("interleaved"):
            self.maybe(0.5, "--chunks", 1, 2, 3)
        if schedule == "interleaved-grouped":
            self.maybe(0.5, "--group", self.world_size, 2 * self.world_size)
        if schedule == "pipedream":
            self.maybe(0.2, "--replicas", "2,1", "1,2", "1,1")
        if schedule.startswith("pipedream"):
            self.flag(0.2, "--stash")
            self.flag(0.3, "--vertical-sync")
        if schedule in ("1f1b", "zb-h1", "zb-h2"):
            self.flag(0.2, "--post-validation")
        self.maybe(0.3, "--partition", "uniform", "parameters",
                   self.balance())
        self.maybe(0.3, "--recompute", "always", "except_last", "never")
        self.flag(0.2, "--early-recompute")

    def spoil(self):
        """Adds what cannot be meant."""
        self.impossible = True
        nowhere = "/no/such/folder/file"
        option, value = self.one_of(
            ("--batch", "0"), ("--batch", "1e3"), ("--dtype", "f8"),
            ("--model", "gpt-giga"), ("--model", "{\"n_embd\":3,\"n_head\":2}"),
            ("--model", "{"), ("--seq", "-1"), ("--seq", "100000"),
            ("--lr", "fast"), ("--lr", "nan"), ("--world-size", "0"),
            ("--world-size", "1000000"), ("--backend", "mpi"),
            ("--nothing", "1"), ("--cluster", "nowhere"),
            ("--data", nowhere), ("--load", nowhere), ("--save", nowhere),
            ("--log", nowhere), ("--device-memory", "10X"), ("--steps", "-1"),
            ("--steps", ""), ("--dropout", "1"), ("--optimizer", "lamb"),
            ("--momentum", "2"), ("--format", "xml"), ("--timeout", "0"))
        if option == "--seq" and not self.is_text:
            option, value = "--image-size", "0"
        if option == "--data" and not self.is_text:
            value = "book"
        self.give(option, value)


# --- Judging a run -----------------------------------------------------------

# A sentence that a user can act on: one line, which names an option.
SENTENCE = re.compile(r"error: [^\n]{10,400}\n?\Z")
INTERNAL = re.compile(r"std::|json\.exception|foreseen on shapes|\bmeta:|"
                      r"terminate called|Assertion|\bbasic_string|vector::")


def judge_refusal(out, err, impossible):
    """What is wrong with exit status 2, or None."""
    if out:
        return ("message", "something stands on stdout: " + out[:200])
    if not SENTENCE.match(err) or INTERNAL.search(err):
        return ("message", "no sentence for a user: " + repr(err[:400]))
    if "--" not in err and "out of memory" not in err:
        return ("message", "names no option: " + err.strip())
    return None


def pairs_of(report):
    """(claim, what, predicted, counted) for all numbers of a report."""
    for rank, pair in enumerate(report["bytes"]):
        yield "bytes", f"rank {rank} bytes", pair["predicted"], pair["counted"]
    for rank, kinds in enumerate(report["peak_memory"]):
        for kind, pair in kinds.items():
            if "predicted" not in pair:
                continue  # a sum of kinds, which is no claim
            yield ("memory", f"rank {rank} {kind}", pair["predicted"],
                   pair["counted"])
    if report["virtual"] is not None:
        pair = report["virtual"]["step_s"]
        yield "time", "step", pair["predicted"], pair["counted"]


def may_be_open(draw, what, report):
    """Counts that have no prediction, and say so."""
    if what == "step" or what.endswith(" workspace"):
        return True
    if what.endswith(" communication") and draw.chapter in LATE_MESSAGES:
        return True
    # A run on shapes predicts activations of ResNets, and of two devices that
    # share a graph
    on_shapes = draw.backend == "sim" or report["virtual"] is None
    by_shapes = not draw.is_text or draw.chapter == "04"
    return what.endswith(" activation") and by_shapes and on_shapes


def judge_report(draw, status, out):
    """What is wrong with a report, or None."""
    try:
        report = json.loads(out)
    except ValueError as error:
        return ("output", f"no JSON: {error}")
    claims = report["claims"]
    differences = collections.defaultdict(list)
    missing = collections.defaultdict(list)
    for claim, what, predicted, counted in pairs_of(report):
        if predicted is None:
            if counted != 0 and not may_be_open(draw, what, report):
                missing[claim].append(f"{what} counted {counted}")
        elif abs(predicted - counted) > 1e-9 * abs(predicted):
            differences[claim].append(
                f"{what} predicted {predicted} counted {counted}")
    if claims["numbers"] == "failed":
        parity = report["parity"]
        differences["numbers"].append(
            f"relative {parity['max_rel']}, allowed {parity['tolerance']}")
    failed = [name for name, verdict in claims.items() if verdict == "failed"]
    if failed or status == 1:
        return ("claim", "; ".join(
            f"{name}: {', '.join(differences[name][:3])}" for name in failed)
                or "exit status 1 without a failed claim")
    for name, verdict in claims.items():
        if verdict != "passed":
            continue
        if differences[name]:
            return ("contradicted", f"{name}: {differences[name][0]}")
        if missing[name]:
            return ("unpredicted", f"{name}: {'; '.join(missing[name][:3])}")
    if draw.backend != "sim" and claims["numbers"] == "not measured":
        return ("unmeasured", "numbers: not measured")
    timed = report["virtual"] is not None and draw.backend != "sim"
    no_steps = report["options"]["steps"] == 0
    if timed and not no_steps and claims["time"] == "not measured":
        return ("unmeasured", "time: not measured")
    return None


Verdict = collections.namedtuple("Verdict", "index draw command state detail")


def kill_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_once(index, args):
    """Draws, runs and judges run `index`."""
    rng = random.Random(f"{args.seed}/{index}")
    chapter = rng.choice(sorted(NAMES))
    if args.chapter:
        chapter = args.chapter[index % len(args.chapter)]
    draw = Draw(rng, chapter, args.backends)
    name = NAMES[chapter]
    program = args.build / "chapters" / name / ("ch" + name)
    command = [str(program), "--format", "json", *draw.words]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, cwd=folder, start_new_session=True)
        try:
            out, err = process.communicate(timeout=args.limit)
        except subprocess.TimeoutExpired:
            kill_group(process)
            out, err = process.communicate()
            process.returncode = None
        finally:
            kill_group(process)
    out, err = out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
    status = process.returncode
    wrong = None
    if status is None:
        wrong = ("hang", f"no end after {args.limit} s; {err[-200:]}")
    elif status < 0 or status > 128:
        wrong = ("crash", f"status {status}; {err[-300:]}")
    elif status == 2:
        wrong = judge_refusal(out, err, draw.impossible)
    elif status in (0, 1):
        wrong = judge_report(draw, status, out)
        if draw.impossible and status == 0:
            wrong = ("accepted", " ".join(draw.words[-2:]))
    else:
        wrong = ("status", f"{status}; {err[-200:]}")
    state = "refused" if status == 2 else "passed"
    if wrong:
        state = wrong[0]
    return Verdict(index, draw, shlex.join(command), state,
                   wrong[1] if wrong else "")


# --- All runs ----------------------------------------------------------------


def read_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build",
                        help="build folder")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", type=int, help="one run, by its number")
    parser.add_argument("--chapter", action="append", choices=sorted(NAMES))
    parser.add_argument("--backend", action="append", dest="backends",
                        choices=["threads", "gloo", "sim"])
    parser.add_argument("--limit", type=float, default=120,
                        help="seconds that a run may take")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", action="store_true",
                        help="print the commands of all runs")
    args = parser.parse_args()
    args.backends = args.backends or ["threads", "threads", "gloo", "sim"]
    args.build = args.build.resolve()
    for chapter in args.chapter or NAMES:
        name = NAMES[chapter]
        program = args.build / "chapters" / name / ("ch" + name)
        if not program.exists():
            parser.error(f"--build {args.build}: has no chapters/{name}")
    return args


def main():
    args = read_arguments()
    indices = [args.only] if args.only is not None else range(args.runs)
    states = collections.defaultdict(collections.Counter)
    failures = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for done in pool.map(lambda i: run_once(i, args), indices):
            states[done.draw.chapter][done.state] += 1
            good = done.state in ("passed", "refused")
            failures += not good
            if good and not args.show:
                continue
            print(f"run {done.index}: {done.state} {done.detail}\n"
                  f"  {done.command}", flush=True)
    for chapter in sorted(states):
        counts = ", ".join(f"{count} {state}" for state, count
                           in sorted(states[chapter].items()))
        print(f"{NAMES[chapter]:<18} {counts}")
    print(f"seed {args.seed}: {len(indices)} runs, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
