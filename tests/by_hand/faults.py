#!/usr/bin/env python3
"""Does harm to running programs, and checks what they make of it.

  tests/by_hand/faults.py BUILD [--kills N] [--freezes N] [--interrupts N]
                            [--seed S] [--short]

  kills       SIGKILL to one rank of a run on processes: all others end and
              name it.
  freezes     SIGSTOP to one rank, --timeout 5: the same. Some ranks have a
              launcher, some were started one by one.
  interrupts  SIGINT or SIGTERM to a run on threads, under glibc's malloc
              checks: it ends with status 130 or 143 (or as usual, when it was
              faster) and has not touched memory that is not its own.
  options     Ranks that were started with different options are refused when
              they meet, with the option and both values.
  pairs       Two runs at once give what each gives alone.
  lock        A build whose ./shardbook was killed still holds the lock.

A fault comes at a random moment of the run, from its first millisecond on.
Every run after a kill or a freeze must end within its timeout and five seconds;
--short, which the test suite runs, does a few of each and measures no time.

Exit status: 0 when all went as it should.
"""

import ctypes
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from book import ROOT, folder, parser, program

SLACK_S = 5

# A step of each takes milliseconds; every run is long enough to be hit.
TINY = ["--model", "gpt-nano", "--data", "random", "--seq", "16", "--batch",
        "12", "--cluster", "none"]
ZERO2 = '{"zero_optimization": {"stage": 2}}'
STAGES = ('{"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2},'
          ' "gradient_accumulation_steps": 3}')
ON_PROCESSES = [
    ("02_ddp", 2, []),
    ("02_ddp", 3, ["--bucket-mb", "0.05"]),
    ("02_ddp", 4, ["--micro-batches", "3"]),
    ("03_zero_fsdp", 2, ["--strategy", "zero1"]),
    ("03_zero_fsdp", 3, ["--strategy", "zero2"]),
    ("03_zero_fsdp", 4,
     ["--strategy", "zero3", "--persistence-threshold", "0"]),
    ("03_zero_fsdp", 3, ["--strategy", "fsdp"]),
    ("03_zero_fsdp", 2, ["--strategy", "fsdp2"]),
    ("05_gpipe", 3, []),
    ("05_gpipe", 4, ["--recompute", "never"]),
    ("06_1f1b", 2, ["--schedule", "interleaved"]),
    ("06_1f1b", 4, ["--schedule", "1f1b"]),
    ("06_1f1b", 3, ["--schedule", "zb-h1"]),
    ("07_tensor_parallel", 2, []),
    ("07_tensor_parallel", 4, ["--recompute"]),
    ("08_tensor_parallel_2d", 4, []),
    ("09_tensor_parallel_2p5d", 4, ["--depth", "1"]),
    ("10_tensor_parallel_3d", 8, []),
    ("11_dtensor", 4, ["--mesh", "2x2"]),
    ("12_sequence_parallel", 4, ["--layout", "zigzag"]),
    ("12_sequence_parallel", 2, ["--kind", "ulysses"]),
    ("12_sequence_parallel", 2, ["--kind", "rsa"]),
    ("13_moe", 3, ["--num-experts", "3"]),
    ("13_moe", 4, ["--ep", "2", "--zero-stage", "2", "--cpu-offload"]),
    ("14_hybrid_3d", 4, ["--tp", "2", "--pp", "2", "--zero-stage", "1",
                         "--micro-batches", "3"]),
    ("14_hybrid_3d", 4, ["--cp", "2", "--num-experts", "4", "--ep", "2",
                         "--micro-batches", "2"]),
    ("15_engine", 2, ["--config", ZERO2]),
    ("15_engine", 4, ["--config", STAGES]),
]
ON_THREADS = [
    ("00_single_device", []),
    ("01_data_parallel", ["--world-size", "2"]),
    ("02_ddp", ["--world-size", "2"]),
    ("03_zero_fsdp", ["--world-size", "2", "--strategy", "fsdp"]),
    ("04_model_parallel", ["--model", "mlp"]),
    ("05_gpipe", ["--world-size", "2"]),
    ("06_1f1b", ["--world-size", "2"]),
    ("07_tensor_parallel", ["--world-size", "2"]),
    ("08_tensor_parallel_2d", ["--world-size", "4"]),
    ("09_tensor_parallel_2p5d", ["--world-size", "8", "--depth", "2"]),
    ("10_tensor_parallel_3d", ["--world-size", "8"]),
    ("11_dtensor", ["--world-size", "2"]),
    ("12_sequence_parallel", ["--world-size", "2"]),
    ("13_moe", ["--world-size", "2"]),
    ("14_hybrid_3d", ["--world-size", "4", "--pp", "2", "--tp", "2"]),
    ("15_engine", ["--world-size", "2", "--config", ZERO2]),
]


def is_sanitized(path):
    """A sanitizer has an allocator of its own, which checks by itself."""
    text = pathlib.Path(path).read_bytes()
    return b"__asan_init" in text or b"__tsan_init" in text


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


LIBC = ctypes.CDLL(None)


def end_with_parent():
    """A child of this script ends with it, whatever ends the script."""
    PR_SET_PDEATHSIG = 1
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(command, **environment):
    """A program in a session of its own; its words go to a file."""
    words = tempfile.TemporaryFile()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=words, env={**os.environ, **environment},
        start_new_session=True, preexec_fn=end_with_parent)
    process.words = words
    return process


def finish(process, limit_s):
    """Status and words; a program that does not end is killed: status None."""
    try:
        status = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        for pid in [process.pid, *ranks_of(process.pid).values()]:
            end(pid)
        process.wait()
        status = None
    process.words.seek(0)
    return status, process.words.read().decode(errors="replace")


def end(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def ranks_of(launcher):
    """The pid of each rank that a launcher has started."""
    ranks = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            if int(stat.rsplit(")", 1)[1].split()[1]) != launcher:
                continue
            for variable in (entry / "environ").read_bytes().split(b"\0"):
                if variable.startswith(b"SHARDBOOK_RANK="):
                    ranks[int(variable.split(b"=")[1])] = int(entry.name)
        except (OSError, IndexError, ValueError):
            continue
    return ranks


class Faults:
    def __init__(self, args):
        self.args = args
        self.random = random.Random(args.seed)
        self.failures = []
        self.slowest = 0

    def complain(self, what, command, words):
        text = f"{what}\n    {' '.join(command)}\n    {words.strip()[-1500:]}"
        self.failures.append(text)
        print("WRONG " + text, flush=True)

    # --- One rank goes wrong ------------------------------------------------

    def launched(self, command, size):
        """Starts a run with a launcher; returns (process, its ranks)."""
        process = start([*command, "--world-size", str(size)])
        for _ in range(2000):
            ranks = ranks_of(process.pid)
            if len(ranks) == size or process.poll() is not None:
                break
            time.sleep(0.02)
        return [process], ranks

    def by_hand(self, command, size):
        """Starts the ranks one by one, as torchrun would."""
        common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                  "MASTER_ADDR": "127.0.0.1",
                  "MASTER_PORT": str(free_port())}
        processes = [
            start([*command, "--world-size", str(size)], RANK=str(rank),
                  **common)
            for rank in range(size)
        ]
        return processes, {r: p.pid for r, p in enumerate(processes)}

    def hurt(self, number, how, timeout_s):
        """One fault. Returns False when the run was over before."""
        chapter, size, options = self.random.choice(ON_PROCESSES)
        is_launched = self.random.random() < 0.7
        steps = "100000" if self.random.random() < 0.8 else "40"
        victim = self.random.randrange(size)
        command = [program(self.args.build, chapter), "--backend", "gloo",
                   "--timeout", str(timeout_s), "--steps", steps, *TINY,
                   *options]
        begin = self.launched if is_launched else self.by_hand
        processes, ranks = begin(command, size)
        time.sleep(self.random.uniform(0, 2.5) ** 1.5)
        try:
            with open(f"/proc/{ranks[victim]}/stat", encoding="utf-8") as stat:
                is_over = stat.read().rsplit(")", 1)[1].split()[0] == "Z"
            os.kill(ranks[victim], how)
        except (KeyError, OSError):
            is_over = True
        if is_over:
            for pid in [p.pid for p in processes] + list(ranks.values()):
                end(pid)
            for process in processes:
                finish(process, 10)
            return False
        hit = time.monotonic()
        limit = timeout_s + SLACK_S + (60 if self.args.short else 10)
        survivors = [p for p in processes
                     if is_launched or p.pid != ranks[victim]]
        ends = [(finish(p, limit), p) for p in survivors]
        took = time.monotonic() - hit
        for pid in ranks.values():
            if how == signal.SIGSTOP and not is_launched:
                end(pid)
        for process in processes:
            process.wait()
        if not is_launched and {status for (status, _), _ in ends} == {0}:
            return False  # the rank had made its last call
        self.slowest = max(self.slowest, took)
        title = (f"{how.name} {number}: rank {victim} of {size}, "
                 f"{'launched' if is_launched else 'by hand'}, {took:.1f} s")
        for (status, words), _ in ends:
            first = re.search(r"rank (\d+) (?:failed|does not answer|did not "
                              r"join)|did not reach rank (\d+)", words)
            named = first and int(first.group(1) or first.group(2))
            if status is None:
                self.complain(f"{title}: did not end", command, words)
            elif status != 3:
                self.complain(f"{title}: status {status}", command, words)
            elif named != victim:
                self.complain(f"{title}: another is named", command, words)
            elif took > timeout_s + SLACK_S and not self.args.short:
                self.complain(f"{title}: late", command, words)
            else:
                continue
            break
        return True

    def kills(self):
        return self.hurts(signal.SIGKILL, self.args.kills)

    def freezes(self):
        return self.hurts(signal.SIGSTOP, self.args.freezes)

    def hurts(self, how, count):
        self.slowest, done, missed = 0, 0, 0
        while done < count and missed < count + 20:
            if self.hurt(done, how, timeout_s=5):
                done += 1
            else:
                missed += 1
        return done, f"; the slowest ended {self.slowest:.1f} s after its fault"

    # --- Interrupts ---------------------------------------------------------

    def interrupts(self):
        checks = {"LD_PRELOAD": "libc_malloc_debug.so.0",
                  "GLIBC_TUNABLES": "glibc.malloc.check=3"}
        if is_sanitized(program(self.args.build, "00_single_device")):
            checks = {}
        unharmed, durations, hit = {}, {}, 0
        for number in range(self.args.interrupts):
            chapter, options = self.random.choice(ON_THREADS)
            command = [program(self.args.build, chapter), "--steps", "4",
                       "--data", "random", "--seq", "32", "--batch", "8",
                       "--format", "json", *options]
            if chapter not in durations:
                began = time.monotonic()
                unharmed[chapter], words = finish(start(command, **checks), 300)
                durations[chapter] = time.monotonic() - began
                if unharmed[chapter] not in (0, 1):
                    self.complain("unharmed", command, words)
            how = self.random.choice([signal.SIGINT, signal.SIGTERM])
            process = start(command, **checks)
            time.sleep(self.random.uniform(0, durations[chapter]))
            process.send_signal(how)
            status, words = finish(process, 120)
            hit += status == 128 + how
            # Before main the signal has its usual effect.
            is_fine = status in (unharmed[chapter], 128 + how, -how)
            if not is_fine or "corrupt" in words:
                self.complain(f"{how.name} {number}: status {status}", command,
                              words)
        return self.args.interrupts, f"; {hit} came in time"

    # --- Options that differ ------------------------------------------------

    def options(self):
        cases = [
            ("02_ddp", 2, "--lr", "0.001", "0.002"),
            ("15_engine", 2, "--config", "{}", ZERO2),
            ("14_hybrid_3d", 3, "--zero-stage", "0", "1"),
            ("02_ddp", 2, "--batch", "12", "24"),
            ("02_ddp", 2, "--seq", "16", "32"),
            ("02_ddp", 2, "--seed", "1", "2"),
            ("02_ddp", 2, "--steps", "2", "3"),
            ("02_ddp", 2, "--bucket-mb", "0.1", "0.2"),
            ("03_zero_fsdp", 2, "--strategy", "zero1", "zero3"),
            ("05_gpipe", 2, "--micro-batches", "2", "3"),
            ("06_1f1b", 2, "--schedule", "1f1b", "zb-h1"),
            ("07_tensor_parallel", 2, "--vocabulary-divisible-by", "1", "7"),
            ("08_tensor_parallel_2d", 4, "--micro-batches", "1", "2"),
            ("09_tensor_parallel_2p5d", 4, "--depth", "1", "4"),
            ("10_tensor_parallel_3d", 8, "--dropout", "0", "0.1"),
            ("11_dtensor", 2, "--mesh", "1x2", "2x1"),
            ("12_sequence_parallel", 2, "--kind", "ring", "ulysses"),
            ("13_moe", 2, "--top-k", "1", "2"),
            ("14_hybrid_3d", 3, "--order", "megatron", "colossal-ai"),
        ]
        if self.args.short:
            cases = cases[:3]
        for chapter, size, option, one, two in cases:
            common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                      "MASTER_ADDR": "127.0.0.1",
                      "MASTER_PORT": str(free_port())}
            command = [program(self.args.build, chapter), "--backend", "gloo",
                       "--world-size", str(size), "--steps", "2", *TINY]
            values = [one] * (size - 1) + [two]
            ranks = [start([*command, option, value], RANK=str(rank), **common)
                     for rank, value in enumerate(values)]
            said = f"{option} is {one} on rank 0 and {two} on rank {size - 1}"
            for rank in ranks:
                status, words = finish(rank, 60)
                if status != 2 or said not in words:
                    self.complain(f"{option}: status {status}", command, words)
        return len(cases), ""

    # --- Two at once --------------------------------------------------------

    def pairs(self):
        for backend in ["threads", "gloo"]:
            command = [program(self.args.build, "02_ddp"), "--backend", backend,
                       "--world-size", "2", "--steps", "3", "--format", "json",
                       *TINY]
            with tempfile.TemporaryDirectory(prefix="shardbook-") as folder:
                def run(seed):
                    save = os.path.join(folder, f"{seed}.safetensors")
                    return subprocess.Popen(
                        [*command, "--seed", seed, "--save", save], cwd=folder,
                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT)

                def loss(process):
                    text = process.communicate(timeout=120)[0].decode()
                    try:
                        return json.loads(text)["loss"]
                    except (ValueError, KeyError):
                        self.complain("no report", command, text)
                        return None

                alone = [loss(run("1")), loss(run("2"))]
                both = [run("1"), run("2")]
                if [loss(p) for p in both] != alone or alone[0] == alone[1]:
                    self.complain("two at once differ", command, str(alone))
                if sorted(os.listdir(folder)) != ["1.safetensors",
                                                  "2.safetensors"]:
                    self.complain("files are left over", command,
                                  str(os.listdir(folder)))
        return 2, ""

    # --- The lock on the build folder ---------------------------------------

    def lock(self):
        """A copy of the script, with a Ninja that takes its time."""
        with tempfile.TemporaryDirectory(prefix="shardbook-") as name:
            folder = pathlib.Path(name)
            for file in ["shardbook", "packages.sh"]:
                shutil.copy(ROOT / file, folder)
            shutil.copytree(ROOT / "chapters" / "table",
                            folder / "chapters" / "table")
            chapter = folder / "chapters" / "00_slow"
            chapter.mkdir(parents=True)
            (chapter / "main.cpp").touch()
            tools = folder / "tools"
            tools.mkdir()
            for tool, text in [
                ("meson", "exit 0"),
                ("dpkg-query", "sed -n 's/^\\([a-z][^ ]*\\) .*/installed "
                 "\\1 1/p' " + str(folder / "packages.sh")),
                ("ninja", f"echo $$ > {folder}/ninja; exec sleep 60"),
            ]:
                (tools / tool).write_text(f"#!/bin/sh\n{text}\n")
                (tools / tool).chmod(0o755)
            command = [str(folder / "shardbook"), "run", "--no-install"]
            path = f"{tools}:{os.environ['PATH']}"
            first = start(command, PATH=path)
            pid = None
            for _ in range(600):
                if (folder / "ninja").exists():
                    pid = (folder / "ninja").read_text().strip()
                if pid or first.poll() is not None:
                    break
                time.sleep(0.05)
            first.kill()
            _, words = finish(first, 10)
            if not pid:
                self.complain("no build began", command, words)
            else:
                held = subprocess.run(
                    ["flock", "-n", str(folder / "build" / ".lock"), "true"],
                    check=False).returncode
                if held != 1:
                    self.complain("the lock is free while Ninja runs", command,
                                  words)
                end(int(pid))
        return 1, ""


KINDS = ["lock", "options", "pairs", "kills", "freezes", "interrupts"]


def main():
    line = parser(__doc__)
    line.add_argument("build", type=folder)
    line.add_argument("--kills", type=int, default=100)
    line.add_argument("--freezes", type=int, default=100)
    line.add_argument("--interrupts", type=int, default=1000)
    line.add_argument("--seed", type=int, default=None)
    line.add_argument("--short", action="store_true")
    line.add_argument("--without-processes", action="store_true",
                      help="this build has no Gloo")
    line.add_argument("--only", action="append",
                      choices=KINDS)
    args = line.parse_args()
    if args.short:
        args.kills, args.freezes, args.interrupts = 3, 2, 7
    if args.seed is None:
        args.seed = 1 if args.short else random.randrange(1 << 30)
    print(f"seed {args.seed}", flush=True)
    faults = Faults(args)
    wanted = args.only or KINDS
    if args.without_processes:
        wanted = [kind for kind in wanted if kind in ("lock", "interrupts")]
    for kind in wanted:
        wrong = len(faults.failures)
        done, more = getattr(faults, kind)()
        print(f"{kind}: {done}, {len(faults.failures) - wrong} wrong{more}",
              flush=True)
    return 1 if faults.failures else 0


if __name__ == "__main__":
    sys.exit(main())
