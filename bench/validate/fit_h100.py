#!/usr/bin/env python3
"""Fits the H100's constants to training steps, and judges them on others.

    python3 bench/validate/fit_h100.py build/bench/validate/validate

prints the rows of both tables of bench/validation.md, and with --known those of
fits that were made before (KNOWN): seconds instead of minutes.

Five constants of sim/devices/h100-80gb.json: the grid below. They minimise the
mean over models of the mean absolute error, on the rows with at most 64 GPUs of
dgxc_h100_gb200_scaling.csv and nemo_long_sequence.csv, one by one in turn, from
START. The device's file is no start: it has been fitted to all models, so what is
left out here would come in again. What is left out:

  by number of devices   the rows with 128 GPUs and more of these tables
  by model               each model in turn: all is fitted again without it
  by table               nemo_megatron_bridge_perf.csv

A sixth one, grouped_efficiency, concerns models with experts alone. It is fitted
to those of nemo_megatron_bridge_perf.csv with at most 64 GPUs in the same way,
after the others, and judged by leaving out models.

Software that is not NVIDIA's has a constant of its own (sim/software/pytorch.json).

The null model is one share of the peak for BF16 and one for FP8, the medians of
the rows that were fitted.
"""
import csv
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
FITTED = ["dgxc_h100_gb200_scaling.csv", "nemo_long_sequence.csv"]
# As rows of the tables begin, and as the page calls them
MODELS = {"Llama 3.1 8b": "Llama 8B", "Llama 3.1 70b": "Llama 70B",
          "Llama 3.1 405b": "Llama 405B", "Nemotron4 15b": "Nemotron 15B",
          "LLAMA2-7B": "Llama 2 7B, with its long sequences"}
EXPERTS_TABLE = "nemo_megatron_bridge_perf.csv"
EXPERTS = {"Qwen3_30B": "Qwen3 30B", "Qwen3_235B": "Qwen3 235B",
           "GPT OSS 120B": "GPT OSS 120B"}
MOST_GPUS = 64
GRID = {
    "sustained": [0.70 + 0.02 * i for i in range(16)],
    "attention_efficiency": [0.35 + 0.05 * i for i in range(9)],
    "memory_efficiency": [0.70 + 0.05 * i for i in range(6)],
    "half_k": [100 + 100 * i for i in range(6)],
    "fp8_speedup": [1.3 + 0.1 * i for i in range(8)],
}
START = {"sustained": 0.80, "attention_efficiency": 0.45,
         "memory_efficiency": 0.80, "half_k": 450, "fp8_speedup": 1.5}
# The fits: of all models, which the device's file has, and of all but one
KNOWN = {each: dict(zip(GRID, values)) for each, values in {
    None: (0.90, 0.35, 0.95, 400, 1.8),
    "Llama 3.1 8b": (0.88, 0.40, 0.95, 500, 1.6),
    "Llama 3.1 70b": (0.92, 0.40, 0.95, 500, 1.5),
    "Llama 3.1 405b": (0.92, 0.40, 0.95, 500, 1.5),
    "Nemotron4 15b": (0.90, 0.35, 0.95, 100, 1.7),
    "LLAMA2-7B": (0.90, 0.75, 0.90, 600, 1.6),
}.items()}
GROUPED = [round(0.30 + 0.02 * i, 2) for i in range(21)]
KNOWN_GROUPED = {None: 0.40, "Qwen3_30B": 0.42, "Qwen3_235B": 0.40,
                 "GPT OSS 120B": 0.36}


def predicted(program, table, name, cluster, folder):
    """The rows of a table, predicted with a cluster in place of a preset."""
    file = pathlib.Path(folder) / "cluster.json"
    file.write_text(json.dumps(cluster))
    out = subprocess.run(
        [program, "--table", table, "--format", "json",
         "--cluster", f"{name}={file}"],
        check=True, capture_output=True, text=True).stdout
    return json.loads(out)["rows"]


class Program:
    """bench/validate/validate, with one file for all runs."""

    def __init__(self, path, folder):
        self.path = path
        self.folder = pathlib.Path(folder)
        self.known = {}
        for table in FITTED:
            with open(HERE / table) as file:
                rows = list(csv.DictReader(file))
            for row in rows:  # a file is beside its table
                beside = HERE / row["model"]
                row["model"] = beside if beside.exists() else row["model"]
            with open(self.folder / table, "w") as file:
                out = csv.DictWriter(file, rows[0].keys())
                out.writeheader()
                out.writerows(row for row in rows
                              if int(row["devices"]) <= MOST_GPUS)

    def rows(self, table, constants, is_whole=True):
        """The rows of a table (or those with few GPUs), predicted with these
        constants."""
        key = (table, is_whole, json.dumps(constants, sort_keys=True))
        if key not in self.known:
            self.known[key] = predicted(
                self.path, (HERE if is_whole else self.folder) / table,
                "dgx-h100", {"extends": "dgx-h100", "device":
                             {"extends": "h100-80gb", **constants}},
                self.folder)
        return self.known[key]


def model(row):
    return next(name for name in [*MODELS, *EXPERTS]
                if row["row"].startswith(name))


def gpus(row):
    return math.prod(map(int, re.findall(r" (?:tp|pp|dp|cp) (\d+)",
                                         row["row"])))


def error(rows):
    return sum(abs(row["error_percent"]) for row in rows) / len(rows)


def error_by_model(rows):
    models = {model(row) for row in rows}
    return sum(error([row for row in rows if model(row) == each])
               for each in models) / len(models)


def fitted_rows(program, constants, without=None):
    rows = [row for table in FITTED
            for row in program.rows(table, constants, is_whole=False)]
    return [row for row in rows if model(row) != without]


def fit(program, without=None):
    constants, best = START, None
    while True:
        before = best
        for name, values in GRID.items():
            for value in values:
                trial = {**constants, name: round(value, 3)}
                now = error_by_model(fitted_rows(program, trial, without))
                if best is None or now < best - 1e-9:
                    best, constants = now, trial
        if best == before:
            return constants


def expert_rows(program, constants, without=None):
    return [row for row in program.rows(EXPERTS_TABLE, constants)
            if row["row"].startswith(tuple(EXPERTS))
            and not (without and row["row"].startswith(without))]


def few_gpus(rows):
    return [row for row in rows if gpus(row) <= MOST_GPUS]


def fit_experts(program, constants, without=None):
    """The best grouped_efficiency: of all models with few GPUs, or of all rows
    but a model's."""
    of = list if without else few_gpus
    return min(GROUPED, key=lambda value: error_by_model(of(expert_rows(
        program, {**constants, "grouped_efficiency": value}, without))))


def null_error(rows, fitted):
    """The error of one share of the peak per precision."""
    def is_fp8(row):
        return "BF16" not in row["row"]

    def work_rate(row):
        value = row["published"] / row["null_scale"]
        return 1 / value if row["unit"] == "s" else value

    errors = []
    for row in rows:
        rates = sorted(work_rate(other) for other in fitted
                       if is_fp8(other) == is_fp8(row))
        rate = rates[len(rates) // 2]
        guess = rate if row["unit"] != "s" else 1 / rate
        errors.append(abs(guess * row["null_scale"] / row["published"] - 1))
    return 100 * sum(errors) / len(errors)


def report(name, rows, fitted):
    print(f"| {name} | {len(rows)} | {error(rows):.1f} % | "
          f"{null_error(rows, fitted):.1f} % |", flush=True)


def report_dense(program, fits):
    constants = fits[None]
    rows = [row for table in FITTED for row in program.rows(table, constants)]
    fitted = few_gpus(rows)
    report(f"fitted: at most {MOST_GPUS} GPUs", fitted, fitted)
    many = [row for row in rows if gpus(row) > MOST_GPUS]
    report(f"left out: {min(map(gpus, many))} to {max(map(gpus, many))} GPUs",
           many, fitted)
    for each, name in MODELS.items():
        # A table without this model would cost time alone
        tables = [table for table in FITTED
                  if any(model(row) == each
                         for row in program.rows(table, constants))]
        rows = [row for table in tables
                for row in program.rows(table, fits[each])]
        report(f"left out, and all fitted again: {name}",
               [row for row in rows if model(row) == each],
               [row for row in fitted if model(row) != each])
    rows = [row for row in program.rows(EXPERTS_TABLE, constants)
            if not row["row"].startswith(tuple(EXPERTS))]
    table = EXPERTS_TABLE.removesuffix(".csv")
    report(f"left out: all of {table} but experts", rows, rows)


def report_experts(program, constants, fits):
    trials = {each: {**constants, "grouped_efficiency": value}
              for each, value in fits.items()}
    rows = expert_rows(program, trials[None])
    few = few_gpus(rows)
    report(f"fitted: at most {MOST_GPUS} GPUs (Qwen3 30B, GPT OSS)", few, few)
    report("left out: 256 GPUs (Qwen3 235B)",
           [row for row in rows if gpus(row) > MOST_GPUS], few)
    for each, name in EXPERTS.items():
        trial = trials[each]
        report(f"left out, and fitted again "
               f"({trial['grouped_efficiency']:.2f}): {name}",
               [row for row in expert_rows(program, trial)
                if model(row) == each], expert_rows(program, trial, each))


def main(folder):
    program = Program(sys.argv[1], folder)
    fits, grouped = KNOWN, KNOWN_GROUPED
    if sys.argv[2:] != ["--known"]:
        fits = {each: fit(program, without=each) for each in [None, *MODELS]}
        grouped = {each: fit_experts(program, fits[None], each)
                   for each in [None, *EXPERTS]}
    report_dense(program, fits)
    report_experts(program, fits[None], grouped)
    device = json.loads(
        (HERE / "../../sim/devices/h100-80gb.json").read_text())
    own = {name: device[name] for name in fits[None]}
    if own != fits[None]:
        sys.exit(f"h100-80gb.json has {own}; the fit is {fits[None]}")
    changed = {each: fits[each] for each in fits if fits[each] != KNOWN[each]}
    if changed or grouped != KNOWN_GROUPED:
        sys.exit(f"KNOWN is out of date: {changed}, {grouped}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own_folder:
        main(own_folder)
