#!/usr/bin/env python3
"""Runs the PyTorch lines of the chapters' pages, and compares their losses.

    python3 tests/docs/pytorch_lines.py build [CHAPTER...]

"In PyTorch" has one fence of Python on each page. Its first line says how it is
started, and it leaves a loss on each rank. A quoted run of the chapter prints the
same losses. Without a Python that has torch 2 (SHARDBOOK_PYTHON, python3 or
/usr/bin/python3) the test is skipped.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77  # for Meson
TOLERANCE = 2e-5

# What prints the same losses: its last ones are those of these ranks. Several
# groups of a pattern are terms of one loss.
COMMANDS = {
    "00_single_device": ("toy_02_ddp", r"^loss of rank 1 (\S+)$", [0]),
    "01_data_parallel": ("toy_01_data_parallel", r"^loss (\S+)$", [0]),
    "02_ddp": ("toy_02_ddp", r"^loss of rank \d (\S+)$", [0, 1]),
    "03_zero_fsdp": ("toy_03_zero_fsdp", r"^ *loss of rank 0 (\S+)$", [0]),
    "04_model_parallel": ("toy_04_model_parallel",
                          r"\A(?:(?!two devices).*\n)*two devices: loss (\S+)$", [0]),
    "05_gpipe": ("toy_05_gpipe", r"^loss (\S+)$", [1]),
    "06_1f1b": ("toy_06_1f1b", r"^loss (\S+)$", [1]),
    "07_tensor_parallel": ("toy_07_tensor_parallel",
                           r"^ *X A +(\d+) +(\d+)\n +(\d+) +(\d+)$", [0, 1]),
    "11_dtensor": ("toy_11_dtensor",
                   r"\Apairwise\n(?:net.*\n)*losses +(\S+) ", [0]),
    # Rank 0 of FSDP's example is a replica of two ranks here
    "14_hybrid_3d": ("toy_03_zero_fsdp", r"^ *loss of rank 0 (\S+)$", [0]),
    "12_sequence_parallel": ("toy_12_sequence_parallel",
                             r"^loss of rank \d (\S+)$", [0, 1]),
    "13_moe": ("toy_13_moe", r"^loss of rank \d (\S+)$", [0, 1]),
    "09_tensor_parallel_2p5d": ("toy_09_tensor_parallel_2p5d",
                                r"^Loss: (\d+)$", [0]),
    "08_tensor_parallel_2d": ("toy_08_tensor_parallel_2d",
                              r"^rank \(\d, \d\): .* = (\d+)$", [0, 1, 2, 3]),
    "10_tensor_parallel_3d": ("toy_10_tensor_parallel_3d",
                              r"^rank \d .* sum (\d+)$", list(range(8))),
    "15_engine": ("toy_02_ddp", r"^loss of rank \d (\S+)$", [0, 1]),
}

LINES = re.compile(r"^```python\n(# [^\n]*\n)(.*?)^```$", re.MULTILINE | re.DOTALL)
END = """
import os
line = f"loss of rank {os.environ.get('RANK', '0')} {float(loss)}\\n"
os.write(1, line.encode())  # in one piece: ranks share the pipe
if torch.distributed.is_initialized(): torch.distributed.destroy_process_group()
"""


def python_with_torch():
    for python in (os.environ.get("SHARDBOOK_PYTHON"), "python3",
                   "/usr/bin/python3"):
        try:
            if python and subprocess.run(
                    [python, "-c", "import torch; assert torch.__version__ >= '2'"],
                    stderr=subprocess.DEVNULL, check=False).returncode == 0:
                return python
        except FileNotFoundError:
            pass
    return None


def losses_of_page(python, chapter):
    page = ROOT / "chapters" / chapter / "README.md"
    start, lines = LINES.search(page.read_text("utf-8")).groups()
    ranks = re.search(r"--nproc-per-node (\d+)", start)
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "train.py")
        program.write_text(lines + END, "utf-8")
        launcher = ["-m", "torch.distributed.run", "--standalone",
                    "--nproc-per-node", ranks[1]] if ranks else []
        done = subprocess.run(
            [python, *launcher, program], text=True, check=False, timeout=120,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        sys.exit(f"{chapter}: {done.stderr}")
    found = re.findall(r"^loss of rank (\d+) (\S+)$", done.stdout, re.MULTILINE)
    return [float(loss) for _, loss in sorted(found)]


def main():
    build, chosen = sys.argv[1], sys.argv[2:]
    python = python_with_torch()
    if not python:
        print("skipped: no Python here has torch 2")
        return SKIPPED
    failed = False
    for chapter, (program, pattern, ranks) in COMMANDS.items():
        if chosen and chapter not in chosen:
            continue
        name, *options = program.split()
        printed = subprocess.run(
            [f"{build}/chapters/{name}", *options], text=True, check=True,
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL).stdout
        ours = [sum(map(float, match.groups()))
                for match in re.finditer(pattern, printed, re.MULTILINE)]
        ours = ours[-len(ranks):]
        losses = losses_of_page(python, chapter)
        theirs = [losses[rank] for rank in ranks]
        agree = len(ours) == len(ranks) and all(
            abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(ours, theirs))
        print(f"{chapter}: {theirs}" +
              ("" if agree else f", but {program} prints {ours}"))
        failed |= not agree
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
