"""Runs the benchmarks: ./shardbook bench.

  run_benchmarks.py targets [NAME...] [-- OPTIONS]   prints what to build
  run_benchmarks.py run [NAME...] [-- OPTIONS]       runs what was built

A NAME is a program of Google Benchmark (kernels for kernels_bench); without one
all of them run. A single NAME may also be one of those in ALONE.
"""

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "chapters", "table"))

import programs  # noqa: E402
from programs import BUILD, die, say  # noqa: E402
from spelling import near  # noqa: E402

VALIDATE = "bench/validate/validate"
PLANNER = "bench/planner/planner"
PLAN = "chapters/planner/shardbook_plan"
GPU = "bench/gpu/gpu_bench"
THIS_MACHINE = "bench/this_machine"
MODEL_PARALLEL = "bench/model_parallel"


def built(target):
    return os.path.join(BUILD, target)


def known_targets():
    """Pairs of a target and its rule, of all that Ninja can build."""
    listing = subprocess.run(["ninja", "-C", BUILD, "-t", "targets", "all"],
                             stdout=subprocess.PIPE, text=True, check=False)
    return [line.partition(": ")[::2] for line in listing.stdout.splitlines()]


def with_chapters(program):
    """The program and those of the chapters, as far as this build has them."""
    pattern = program + r"|chapters/[0-9][^/]*/ch[^/]*"
    return [target for target, rule in known_targets()
            if "_LINKER" in rule and re.fullmatch(pattern, target)]


def run_pytorch(options):
    """The same work here and in PyTorch, by a Python that has it."""
    return programs.run([os.environ["SHARDBOOK_PYTHON"],
                         os.path.join(ROOT, "bench", "pytorch.py"), *options])


def run_validate(options):
    return programs.run([built(VALIDATE), *options])


def run_planner(options):
    """How long plans take, or (--published) other people's beside ours."""
    return programs.run([built(PLANNER), *options])


def run_this_machine(options):
    """Predicts the chapters' wall time here, and measures it."""
    return programs.run([built(THIS_MACHINE), built("chapters"), *options])


def run_model_parallel(options):
    """PyTorch's experiment: ResNet-50 on one device, two in turn, and in splits.

    Measured with a fifth of its images, one core per device, beside the
    simulator's prediction, which also chooses the cut for each size of splits;
    then in its own sizes on two simulated T4s. Options concern what is measured,
    and leave out the T4s.
    """
    cluster, partition = "this-machine", "time"
    cache = (os.environ.get("XDG_CACHE_HOME")
             or os.path.join(os.environ["HOME"], ".cache"))
    if not os.path.isfile(os.path.join(cache, "shardbook/this-machine.json")):
        say("Predictions need ./shardbook bench this-machine, once.")
        cluster, partition = "none", "half"
    charts = os.path.join(BUILD, "bench-results")
    os.makedirs(charts, exist_ok=True)
    command = [built(MODEL_PARALLEL), "--model", "resnet50", "--image-size",
               "128", "--batches", "3", "--repeats", "10"]
    status = programs.run(
        [*command, "--batch", "24", "--cluster", cluster,
         "--partition", partition, "--split-size", "4",
         "--sweep", "1,2,3,4,6,8,12",
         "--charts", f"{charts}/model-parallel-measured", *options],
        environment={"OMP_NUM_THREADS": "2"})
    if status or options:
        return status
    return programs.run(
        [*command, "--backend", "sim", "--batch", "120", "--split-size", "20",
         "--sweep", "1,3,5,8,10,12,20,40,60",
         "--charts", f"{charts}/model-parallel-t4"])


def run_gpu(options):
    """One GPU: products, copies and training steps, against PyTorch."""
    script = os.path.join(ROOT, "bench", "gpu", "pytorch_gpu.py")
    return programs.run([built(GPU), "--pytorch", script, *options])


def run_explorer(options):
    """The explorer's modules, beside the program that they are built from."""
    return programs.run(["node", os.path.join(ROOT, "bench", "explorer.js"),
                         BUILD, *options])


def explorer_targets():
    """Both modules, and the program."""
    targets = ["explorer", "touch"]
    if (targets[0], "phony") not in known_targets():
        die("bench explorer: this build has no emscripten; ./shardbook explore "
            "installs it")
    return [*targets, PLAN]


# The targets of each, and the function that runs it.
ALONE = {
    "pytorch": (lambda: with_chapters("bench/pytorch_peer"), run_pytorch),
    "validate": (lambda: [VALIDATE], run_validate),
    "planner": (lambda: [PLANNER], run_planner),
    "this-machine": (lambda: with_chapters(THIS_MACHINE), run_this_machine),
    "model-parallel": (lambda: [MODEL_PARALLEL], run_model_parallel),
    "explorer": (explorer_targets, run_explorer),
    "gpu": (lambda: [GPU, "gpu_libraries"], run_gpu),
}


def find_benchmarks(words):
    """The programs that the words name; without words, all."""
    names = [match[1] for target, _ in known_targets()
             if (match := re.fullmatch(r"bench/([^/]*)_bench", target))]
    chosen = [word.removesuffix("_bench") for word in words]
    for word, name in zip(words, chosen):
        if name not in names:
            known = [*names, *ALONE]
            die(f"bench {word}: there is no such benchmark{near(word, known)}; "
                f"there are: {' '.join(known)}")
    return chosen or names or die("bench: there is no benchmark in this build")


def run_benchmark(name, options):
    say(f"running {name} ...")
    results = os.path.join(BUILD, "bench-results")
    os.makedirs(results, exist_ok=True)
    return programs.run([built(f"bench/{name}_bench"),
                         f"--benchmark_out={results}/{name}.json",
                         "--benchmark_out_format=json", *options])


def read_words(words):
    """The names, and the options after --."""
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1:]


def print_targets(*words):
    names, options = read_words(words)
    if len(names) == 1 and names[0] in ALONE:
        targets, _ = ALONE[names[0]]
        print(*targets(), sep="\n")
        if "cuda" in options:  # --device cuda
            print("gpu_libraries")
    else:
        for name in find_benchmarks(names):
            print(f"bench/{name}_bench")


def run(*words):
    names, options = read_words(words)
    if len(names) == 1 and names[0] in ALONE:
        _, run_alone = ALONE[names[0]]
        os.environ["SHARDBOOK_COMMAND"] = f"./shardbook bench {names[0]} --"
        return run_alone(options)
    statuses = [run_benchmark(name, options) for name in find_benchmarks(names)]
    say("Results as JSON are in build/bench-results/.")
    return 1 if any(statuses) else 0


if __name__ == "__main__":
    programs.main(print_targets, run)
