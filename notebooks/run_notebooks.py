"""Opens the notebooks, or executes them: ./shardbook notebook.

  run_notebooks.py check [NAME...]                    finds mistakes in NAMEs
  run_notebooks.py open BUILD [OPTIONS OF JUPYTER]
  run_notebooks.py execute BUILD [--update] [NAME...]

A NAME is a number or a name: 2, 02, ddp, 02_ddp; without one, all notebooks
run, each in a kernel of its own. What cells print, and the texts of what they
display, must equal what the file has; with --update the file gets what came
out. A cell with the tag "measured" runs, but its output may differ; one with
the tag "raises-exception" must fail. Then the exercises are answered, rightly and wrongly (exercises.py).

Exit status: 0, all is well; 1, a notebook failed; 2, a mistake in the command.
"""

import argparse
import asyncio
import collections
import os
import pathlib
import re
import sys
import time

FOLDER = pathlib.Path(__file__).resolve().parent
CELL_LIMIT_S = 300  # of a cell that hangs


def die(text):
    print("shardbook: " + text, file=sys.stderr)
    sys.exit(2)


def choose(folder, names):
    """The notebooks that `names` mean, in order; without names, all."""
    files = sorted(folder.glob("*.ipynb"))
    chosen = set()
    for name in names:
        wanted = name.removesuffix(".ipynb")
        prefix = wanted.zfill(2) + "_" if wanted.isdigit() else "/"
        found = [file for file in files
                 if wanted in (file.stem, re.sub(r"^\d+_", "", file.stem))
                 or file.stem.startswith(prefix)]
        if not found:
            die(f"notebook {name}: there is no such notebook; there are "
                + ", ".join(file.stem for file in files))
        chosen.update(found)
    return sorted(chosen) if names else files


def use_own_kernel(build):
    """Lets Jupyter find the kernel of this build, before all others."""
    folder = build / "share" / "jupyter"
    if not (folder / "kernels" / "xcpp17" / "kernel.json").exists():
        die("this build has no kernel for notebooks: it needs xeus-dev and "
            "LLVM 19; ./shardbook doctor lists the packages")
    paths = [str(folder), os.environ.get("JUPYTER_PATH", "")]
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, paths))


# ---- Opening


def has_kernel():
    """Whether Jupyter knows a kernel xcpp17 already: xeus-cling, xeus-cpp."""
    from jupyter_client.kernelspec import KernelSpecManager

    return "xcpp17" in KernelSpecManager().find_kernel_specs()


def open_jupyter(build, options):
    if has_kernel():
        print("Jupyter has a kernel xcpp17, which the notebooks will use.",
              file=sys.stderr)
    else:
        use_own_kernel(build)
    command = [sys.executable, "-m", "notebook",
               f"--notebook-dir={FOLDER.parent}",
               "--NotebookApp.default_url=/tree/notebooks",
               "--ServerApp.default_url=/tree/notebooks"]
    if os.geteuid() == 0:
        command.append("--allow-root")
    os.execv(command[0], command + options)


# ---- Executing

Outcome = collections.namedtuple("Outcome", "path notebook problems seconds")


async def run_cells(path):
    """Executes one notebook; its outputs are those that came out."""
    import exercises
    import nbclient
    import nbclient.exceptions as failures
    import nbformat

    began = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=CELL_LIMIT_S, startup_timeout=CELL_LIMIT_S,
        kernel_name="xcpp17", record_timing=False, resources={"metadata": {"path": path.parent}})
    index = -1
    problem = ""
    problems = []
    try:
        async with client.async_setup_kernel():
            for index, cell in enumerate(notebook.cells):
                await client.async_execute_cell(cell, index)
            problems = await exercises.judge(client)
    except failures.CellExecutionError:
        error = notebook.cells[index].outputs[-1]
        problem = f"failed\n{error.ename}: {error.evalue}"
    except failures.CellTimeoutError:
        problem = f"took more than {CELL_LIMIT_S} seconds"
    except failures.DeadKernelError:
        problem = ("ended the kernel; the cell may have called exit(), or the "
                   "process was killed")
    except RuntimeError as error:
        problem = f"found no kernel: {error}"
    if problem:
        problems = [f"cell {index + 1} {problem}"]
    return Outcome(path, notebook, problems, time.monotonic() - began)


async def run_all(paths, jobs):
    """Yields the outcomes in the order of `paths`."""
    free = asyncio.Semaphore(jobs)

    async def run_one(path):
        async with free:
            return await run_cells(path)

    tasks = [asyncio.create_task(run_one(path)) for path in paths]
    for task in tasks:
        yield await task


def report(outcome, stored, update):
    """Prints the line of one notebook, and what was wrong. True if nothing."""
    import notebook_files

    problems = list(outcome.problems)
    if not problems and update:
        notebook_files.write(outcome.path, outcome.notebook)
    elif not problems:
        problems = notebook_files.differences(stored, outcome.notebook)
    cells = sum(c.cell_type == "code" for c in outcome.notebook.cells)
    print(f"{'FAILED' if problems else 'ok':7}{outcome.path.stem:24}"
          f"{cells:4} cells {outcome.seconds:6.1f} s", flush=True)
    for problem in problems:
        print("    " + problem.rstrip("\n").replace("\n", "\n    "))
    return not problems


async def execute(build, args):
    import nbformat

    paths = choose(args.folder, args.name)
    if not paths:
        die(f"{args.folder} has no notebooks")
    use_own_kernel(build)
    stored = {path: nbformat.read(path, as_version=4) for path in paths}
    passed = 0
    async for outcome in run_all(paths, args.jobs):
        passed += report(outcome, stored[outcome.path], args.update)
    print(f"{passed} passed, {len(paths) - passed} failed")
    return 0 if passed == len(paths) else 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["check", "open", "execute"])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER)
    args, options = parser.parse_known_intermixed_args()
    if args.action == "check":
        choose(args.folder, args.words)
        return 0
    build = pathlib.Path(args.words[0]).resolve()
    args.name = args.words[1:]
    if args.action == "open":
        return open_jupyter(build, args.name + options)
    if options:
        die(f"notebook {options[0]}: unknown option; there are --execute and "
            "--update")
    return asyncio.run(execute(build, args))


if __name__ == "__main__":
    sys.exit(main())
