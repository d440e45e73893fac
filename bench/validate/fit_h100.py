#!/usr/bin/env python3
"""Fits the H100's constants to training steps, and judges them on others.

    python3 bench/validate/fit_h100.py build/bench/validate/validate

Three constants (sim/devices/h100-80gb.json): `sustained`, `attention_efficiency`
and `fp8_speedup`. They minimise the mean absolute error over the rows of
dgxc_h100_gb200_scaling.csv with Llama 8B and 70B on at most 64 GPUs, one by one
in turn over a grid, from their values in the file. Everything else is left out:
the other models (405B, Nemotron 15B), the other numbers of GPUs (128), and the
other tables. The null model is the best share of the peak for the same rows,
one for BF16 and one for FP8; for rows left out, it is that of the rows of the
fit.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
FITTED = "dgxc_h100_gb200_scaling.csv"
OTHERS = ["nemo_megatron_bridge_perf.csv", "nemo_long_sequence.csv",
          "llama3_table4.csv"]
GRID = {
    "sustained": [0.70 + 0.01 * i for i in range(31)],
    "attention_efficiency": [0.40 + 0.05 * i for i in range(11)],
    "memory_efficiency": [0.7 + 0.05 * i for i in range(6)],
    "half_k": [100 + 50 * i for i in range(11)],
    "fp8_speedup": [1.5 + 0.05 * i for i in range(11)],
}


def predict(program, table, constants):
    """The rows of a table, predicted with these constants."""
    cluster = {"extends": "dgx-h100", "device": {
        "extends": "h100-80gb", **constants}}
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "h100.json"
        file.write_text(json.dumps(cluster))
        out = subprocess.run(
            [program, "--table", HERE / table, "--format", "json",
             "--cluster", f"dgx-h100={file}"],
            check=True, capture_output=True, text=True).stdout
    return json.loads(out)["rows"]


def is_fitted(row):
    found = re.match(r"Llama 3.1 (8b|70b) \w+ (\d+),", row["row"])
    return bool(found) and int(found[2]) <= 64


def error(rows):
    return sum(abs(row["error_percent"]) for row in rows) / len(rows)


def fit(program):
    device = json.loads(
        (HERE / "../../sim/devices/h100-80gb.json").read_text())
    constants = {name: device[name] for name in GRID}
    best = None
    while True:
        before = best
        for name, values in GRID.items():
            for value in values:
                trial = {**constants, name: round(value, 3)}
                rows = predict(program, FITTED, trial)
                now = error([row for row in rows if is_fitted(row)])
                if best is None or now < best - 1e-9:
                    best, constants = now, trial
        if best == before:
            return constants


def null_error(rows, fitted):
    """The error of one share of the peak per precision, from fitted rows."""
    errors = []
    for row in rows:
        same = [other for other in fitted
                if ("FP8" in other["row"]) == ("FP8" in row["row"])]
        shares = sorted(r["published"] / r["null_scale"] for r in same)
        share = shares[len(shares) // 2]
        errors.append(abs(share * row["null_scale"] / row["published"] - 1))
    return 100 * sum(errors) / len(errors)


def report(name, rows, fitted):
    print(f"{name:52} {len(rows):3} rows  {error(rows):5.1f} %  "
          f"null {null_error(rows, fitted):5.1f} %")


def main():
    program = sys.argv[1]
    constants = fit(program)
    print(constants)
    rows = predict(program, FITTED, constants)
    fitted = [row for row in rows if is_fitted(row)]
    report("fitted: Llama 8B and 70B, at most 64 GPUs", fitted, fitted)
    others = [row for row in rows if not is_fitted(row)]
    report("left out: the same models on 128 GPUs",
           [row for row in others if re.match(r"Llama 3.1 (8b|70b)",
                                              row["row"])], fitted)
    report("left out: Llama 405B",
           [row for row in others if "405b" in row["row"]], fitted)
    report("left out: Nemotron 15B",
           [row for row in others if "Nemotron" in row["row"]], fitted)
    for table in OTHERS:
        rows = predict(program, table, constants)
        print(f"left out: {table:42} {len(rows):3} rows  {error(rows):5.1f} %")


main()
