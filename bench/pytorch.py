"""The same work in Shardbook and in PyTorch, in turn, in one run.

    ./shardbook bench pytorch
    python3 bench/pytorch.py [ROW...] [--rounds 7] [--seconds 0.5]

Both sides are processes that time a work on request. Each row starts one of
each, warms them up, and lets them run by turns: A B A B ... A round's ratio is
ours over PyTorch's, so a machine that slows down slows both. The table has
medians, and the least and the largest ratio. Nothing is asserted. The row step-busy
runs beside two processes that compute all the time, with two threads. Rows of
memory compare the largest resident sets of processes that make ten steps.

The protocol, for build/bench/pytorch_peer (ours) and pytorch_work.py:

    pytorch_peer WORK [OPTIONS]

    matmul     --size N --threads T
               C = A B, f32, N by N, in memory that is reused.
    step       --model MODEL --batch B --seq S --threads T --dtype f32|bf16
               One training step of gpt-micro or llama-micro on one fixed batch
               of random token ids: zero the gradients, forward, mean cross
               entropy, backward, AdamW (lr 1e-3, no decay). Nothing is printed
               or recorded meanwhile.
    allreduce  --bytes N --backend threads|gloo --world-size W --threads T
               The sum of an f32 buffer of N bytes over W ranks, in place. On
               start rank r fills it with r + 1 and checks the sum; after that
               it is zero, so that repeated sums stay finite.
    ddp        --model gpt-micro --batch B --seq S
               --backend threads|gloo --world-size W --threads T
               The step under DDP; B is the batch of ONE rank, which differs
               from rank to rank. T is threads per rank.

    attention  --seq S --threads T
               Forward and backward of causal attention in f32: 8 samples of S
               tokens, 8 heads 32 wide, as in gpt-micro.

    images     --model resnet50 --batch B --size N --threads T
               The step in f32 on one fixed batch of random images 3 x N x N
               with 1000 labels, by SGD (lr 1e-3, no momentum).

    On start it prepares and warms up, then prints one line:
        ready {"version": "...", "variant": "..."}
    It answers each line on stdin with one line on stdout, flushed:
        run N      N iterations; the answer is seconds for all N together, as a
                   decimal. With several ranks: a barrier, then each rank times
                   its own N, and the answer is the slowest rank's.
        quit       no answer; it ends with status 0, as at the end of stdin.
    Nothing else goes to stdout. An error is a sentence on stderr and a status
    other than 0. Between commands it sleeps, on all threads and ranks:
    the other side is running. With --backend gloo it starts its own ranks on
    127.0.0.1, and they end with it, however it ends.
"""

import argparse
import contextlib
import itertools
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, os.path.join(ROOT, "tests", "pytorch"))
import torch_python

# Starting PyTorch and trying its forms takes long where its BLAS is slow.
START_TIMEOUT_S = 300
RUN_TIMEOUT_S = 120
ROW_BUDGET_S = 60
SIZES = ["--batch", "8", "--seq", "128"]
MICRO = ["--model", "gpt-micro", *SIZES]
LLAMA = ["--model", "llama-micro", *SIZES]
BF16 = ["--dtype", "bf16"]


class Row:
    """One line of the table: a work, and how each side is asked for it."""

    def __init__(self, name, title, work, both, backend="", bar=None,
                 threads=None, beside=0, of_memory=False):
        self.name, self.title, self.bar = name, title, bar
        self.threads, self.beside = threads, beside
        self.of_memory = of_memory
        self.ours, self.theirs = [work, *both], [work, *both]
        if backend:
            self.ours += ["--backend", backend]
            self.theirs += ["--backend", "gloo"]


def rows():
    """The table. A bar is the ratio that the README promises at most."""
    images = ["--model", "resnet50", "--batch", "24", "--size", "128"]
    table = [
        Row("matmul", "f32 matmul 1024^3", "matmul", ["--size", "1024"]),
        Row("step", "gpt-micro step", "step", MICRO, bar=0.75),
        Row("step-bf16", "the same in bf16", "step", [*MICRO, *BF16]),
        Row("llama", "llama-micro step", "step", LLAMA, bar=0.8),
        Row("llama-bf16", "the same in bf16", "step", [*LLAMA, *BF16]),
        Row("step-busy", "gpt-micro, a busy machine", "step", MICRO, bar=0.15,
            threads=2, beside=2),
        Row("memory", "gpt-micro, peak memory", "step", MICRO, bar=0.2,
            of_memory=True),
        Row("llama-memory", "llama-micro, peak memory", "step", LLAMA,
            of_memory=True),
        *(Row(f"attention-{seq}", f"attention, {seq} tokens", "attention",
              ["--seq", str(seq)]) for seq in (128, 1024)),
        Row("resnet50", "ResNet-50 step, 24 of 128^2", "images", images,
            bar=0.85),
    ]
    for backend, bar in (("threads", 0.2), ("gloo", 1.0)):
        sizes = [("", "64 MiB", 64 << 20, bar)]
        if backend == "gloo":
            sizes += [("-1KiB", "1 KiB", 1 << 10, None)]
            sizes += [("-1MiB", "1 MiB", 1 << 20, None)]
        for ranks, (suffix, size, count, promised) in itertools.product(
            (2, 4), sizes
        ):
            title = f"all-reduce {size}, {backend} x{ranks}"
            both = ["--bytes", str(count), "--world-size", str(ranks)]
            name = f"allreduce-{backend}-{ranks}{suffix}"
            table.append(Row(name, title, "allreduce", both, backend, promised))
    for backend, bar in (("threads", 0.7), ("gloo", None)):
        title = f"gpt-micro DDP step, {backend} x2"
        both = [*MICRO, "--world-size", "2"]
        table.append(Row(f"ddp-{backend}", title, "ddp", both, backend, bar))
    return table


class PeerError(Exception):
    """A peer that ended, kept silent, or answered nonsense."""


class Peer:
    """A process that times one work; a context, so that none is left over."""

    def __init__(self, command, threads):
        environment = dict(os.environ)
        environment["OMP_NUM_THREADS"] = str(threads)
        environment["MKL_NUM_THREADS"] = str(threads)
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        self.name = os.path.basename(command[0])
        self.buffer = b""
        # A session of its own: its ranks can be ended together with it.
        self.process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            # No peer outlives this script, even when it is killed.
            preexec_fn=torch_python.die_with_parent,
        )

    def __enter__(self):
        try:
            line = self._line(START_TIMEOUT_S)
            if not line.startswith("ready "):
                raise PeerError(f"{self.name} said {line!r} instead of ready")
            self.ready = json.loads(line[len("ready ") :])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        try:
            self.process.stdin.write(b"quit\n")
            self.process.stdin.close()
        except OSError:
            pass
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process.stdout.close()

    def _line(self, timeout_s):
        end = time.monotonic() + timeout_s
        stdout = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise PeerError(f"{self.name}: no answer in {timeout_s} s")
            piece = os.read(stdout, 65536)
            if not piece:
                raise PeerError(f"{self.name} ended without an answer")
            self.buffer += piece
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line.decode("utf-8", "replace")

    def run(self, count):
        """Seconds for one of `count` iterations."""
        try:
            self.process.stdin.write(f"run {count}\n".encode())
            self.process.stdin.flush()
        except OSError:
            raise PeerError(f"{self.name} ended") from None
        line = self._line(RUN_TIMEOUT_S)
        try:
            return float(line) / count
        except ValueError:
            raise PeerError(f"{self.name} said {line!r}, not seconds") from None

    def peak_bytes(self):
        """The largest resident set of the process so far."""
        with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])

    def count_for(self, seconds):
        """How many iterations take about `seconds`; warms up on the way."""
        self.run(1)
        once = min(self.run(1) for _ in range(2))
        return max(1, round(seconds / max(once, 1e-9)))


@contextlib.contextmanager
def busy(count):
    """So many processes that compute until the context ends."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"],
                                  preexec_fn=torch_python.die_with_parent)
                 for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Bench:
    """The options, and what one row learns for the next."""

    def __init__(self, options):
        self.options = options
        self.peer = os.path.join(options.build, "bench", "pytorch_peer")
        self.form = None

    def peaks(self, row):
        """Of both sides, each in a process of its own that makes ten steps."""
        with self.torch_peer([*row.theirs, "--one-form"]) as theirs:
            theirs.run(10)
            result = {"torch": theirs.ready, "torch_bytes": theirs.peak_bytes()}
        with Peer([self.peer, *row.ours], self.options.threads) as ours:
            ours.run(10)
            result["ours_bytes"] = ours.peak_bytes()
        result["ratios"] = [result["ours_bytes"] / result["torch_bytes"]]
        return result

    def torch_peer(self, arguments, threads=None):
        command = [sys.executable, os.path.join(HERE, "pytorch_work.py")]
        return Peer([*command, *arguments], threads or self.options.threads)

    def find_form(self):
        """The fastest form of the step on one device, tried once."""
        if self.form is None:
            with self.torch_peer(["step", *MICRO]) as theirs:
                self.form = theirs.ready["variant"]
        return self.form

    def measure(self, row):
        """Runs one row; returns what goes into the JSON."""
        arguments = list(row.theirs)
        if arguments[0] == "ddp":
            arguments += ["--form", self.find_form()]
        result = {"name": row.name, "title": row.title, "bar": row.bar}
        result.update(ours_s=[], torch_s=[])
        if row.of_memory:
            return {**result, **self.peaks(row)}
        threads = row.threads or self.options.threads
        with self.torch_peer(arguments, threads) as theirs:
            result["torch"] = theirs.ready
            if row.ours[0] == "step":
                self.form = theirs.ready["variant"]
            if self.options.only_torch:
                with busy(row.beside):
                    self.rounds(result, [(theirs, "torch_s")])
                return result
            with Peer([self.peer, *row.ours], threads) as ours:
                result["ours"] = ours.ready
                if row.beside:
                    result["alone_s"] = [ours.run(1) for _ in range(7)]
                with busy(row.beside):
                    self.rounds(result, [(ours, "ours_s"), (theirs, "torch_s")])
        pairs = list(zip(result["ours_s"], result["torch_s"]))
        result["ratios"] = [a / b for a, b in pairs]
        return result

    def rounds(self, result, sides):
        counts = [peer.count_for(self.options.seconds) for peer, _ in sides]
        start = time.monotonic()
        for done in range(self.options.rounds):
            # Three rounds are enough of what takes minutes.
            if done >= 3 and time.monotonic() - start > ROW_BUDGET_S:
                break
            for (peer, key), count in zip(sides, counts):
                result[key].append(peer.run(count))


def value_text(result, side):
    """A median of seconds, or bytes, with its unit."""
    seconds = result[side + "_s"]
    if not seconds:
        peak = result.get(side + "_bytes")
        return f"{peak / 2**20:.0f} MiB" if peak else "-"
    median = statistics.median(seconds)
    if median < 1e-3:
        return f"{median * 1e6:.0f} us"
    return f"{median * 1e3:.1f} ms"


def line_of(result, row):
    """The row as it is printed."""
    ratios, text, verdict = result.get("ratios"), "-", ""
    if ratios:
        median = statistics.median(ratios)
        text = f"{median:.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
        if row.bar:
            verdict = (
                f"{row.bar:g} {'met' if median <= row.bar else 'missed'}"
            )
    elif row.bar:
        verdict = f"{row.bar:g}"
    line = (
        f"{row.title:<30}{value_text(result, 'ours'):>10}"
        f"{value_text(result, 'torch'):>10}{text:>18} {verdict}"
    )
    return line.rstrip()


def processor():
    """The processor's name, as Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "unknown processor"


def parse(names):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="rows: " + ", ".join(names)
    )
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="per turn")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument(
        "--only-torch", action="store_true", help="leave our side out"
    )
    options = parser.parse_args()
    for name in options.rows:
        if not any(known.startswith(name) for known in names):
            parser.error(f"no row {name}; known: " + ", ".join(names))
    if options.rounds < 1 or options.seconds <= 0 or options.threads < 1:
        parser.error("--rounds, --seconds and --threads are positive")
    return options


def main():
    table = rows()
    options = parse([row.name for row in table])
    reason = torch_python.ensure_torch()
    if reason:
        print(f"bench pytorch: {reason}", file=sys.stderr)
        return 2
    bench = Bench(options)
    if not options.only_torch and not os.access(bench.peer, os.X_OK):
        print(
            f"bench pytorch: {bench.peer} is not built; build it, or give "
            "--only-torch",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Known before the first row, and written with the results.
    probe = "import torch; print(torch.__version__); print('|'.join("
    probe += "torch.__config__.show().split()))"
    version, config = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        check=True,
        timeout=START_TIMEOUT_S,
    ).stdout.split("\n")[:2]
    print(f"{processor()}, {os.cpu_count()} cores; PyTorch {version}")
    print(
        f"{options.threads} thread(s) per rank, {options.rounds} rounds in turn\n"
        "ratio: our time over PyTorch's; smaller is faster"
    )
    if "BLAS_INFO=generic" in config:
        print(
            "This PyTorch brings no BLAS of its own:\n"
            "its products are as fast as the system's libblas."
        )
    print(f"\n{'':<30}{'ours':>10}{'PyTorch':>10}{'ratio (range)':>18} bar")
    results, status = [], 0
    for row in table:
        wanted = options.rows or [row.name]
        if not any(row.name.startswith(name) for name in wanted):
            continue
        try:
            results.append(bench.measure(row))
            print(line_of(results[-1], row), flush=True)
        except (PeerError, ValueError, KeyError) as error:
            print(f"{row.title:<30} failed: {error}", flush=True)
            status = 1
    folder = os.path.join(options.build, "bench-results")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "pytorch.json")
    machine = {"processor": processor(), "cores": os.cpu_count()}
    with open(path, "w", encoding="utf-8") as file:
        summary = {"machine": machine, "torch": version, "rows": results}
        json.dump({**summary, "options": vars(options)}, file, indent=1)
    print(f"\nWritten: {path}")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
