"""Feeds the cells of notebooks to cling, the compiler of xeus-cling.

  PYTHON tests/by_hand/cling.py [NAME...]

PYTHON can import cppyy with its cling 6.32.8 (CONTRIBUTING.md), and build/ has
the book's library. Every cell must compile and print the text that the file
has; cells with the tag "measured" may print another. Each notebook runs in a
process of its own. Exit status: 0, all is well; 1, a notebook failed; 2, a
mistake in the command.
"""

import ctypes
import difflib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from book import ROOT  # noqa: E402

sys.path.insert(0, str(ROOT / "notebooks"))
import notebook_files  # noqa: E402
import run_notebooks  # noqa: E402

# What xeus-cling does with a display. The text is that of text_of() below.
DISPLAY = """
#include <iostream>
#include <nlohmann/json.hpp>
namespace shardbook::notebook {
void display_bundle(const nlohmann::json& bundle, const std::string&, bool) {
  std::string kinds;
  for (const auto& [kind, ignored] : bundle.items()) {
    kinds += (kinds.empty() ? "" : ", ") + kind;
  }
  std::cout << "[" << kinds << "]\\n" << bundle.value("text/plain", "") << "\\n";
}
void clear_display(bool) {}
}
"""


class Output(dict):
    """An output of a notebook, as notebook_files reads it."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__

    def copy(self):
        return Output(self)


def text_in_file(cell):
    outputs = []
    for output in cell["outputs"]:
        output = Output(output)
        for key in ("text", "data"):
            if isinstance(output.get(key), list):
                output[key] = "".join(output[key])
            elif key in output:
                output[key] = {kind: "".join(value)
                               for kind, value in output[key].items()}
        outputs.append(output)
    return notebook_files.text_of({"outputs": outputs})


class Cling:
    """The interpreter, with the standard output of this process in a file."""

    def __init__(self, log):
        import cppyy

        self.process = cppyy.gbl.gInterpreter.ProcessLine
        cppyy.add_include_path(str(ROOT / "notebooks" / "kernel"))
        cppyy.cppdef(DISPLAY)
        self.log = log
        os.dup2(log.fileno(), 1)

    def line(self, code):
        """Whether cling could run it."""
        failed = ctypes.c_int(0)
        self.process(code, ctypes.pointer(failed))
        return failed.value == 0

    def run(self, cell):
        """What a cell prints; None if it fails. Directives go line by line."""
        begin = os.lseek(self.log.fileno(), 0, os.SEEK_END)
        lines = [line for line in cell.splitlines() if line.strip()]
        parts = lines if lines and lines[0].startswith("#") else [cell]
        if not all([self.line(part) for part in parts]):
            return None
        self.line("std::cout.flush();")
        self.log.seek(begin)
        return self.log.read()


def problems_of(notebook):
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        cling = Cling(log)
        for number, cell in enumerate(notebook["cells"], 1):
            if cell["cell_type"] != "code":
                continue
            text = cling.run("".join(cell["source"]))
            if text is None:
                yield f"cell {number} fails"
                return
            expected = text_in_file(cell)
            if text != expected and "measured" not in notebook_files.tags(cell):
                lines = difflib.unified_diff(
                    expected.splitlines(), text.splitlines(), "in the file",
                    "by cling", lineterm="", n=1)
                yield f"cell {number} prints something else\n" + "\n".join(
                    lines)


def run_one(path):
    """In a process of its own: what is wrong, as the exit status."""
    os.chdir(path.parent)
    problems = list(problems_of(json.loads(path.read_text("utf-8"))))
    for problem in problems:
        print("    " + problem.replace("\n", "\n    "), file=sys.stderr)
    # Globals of cells and of cling are destroyed in no useful order.
    os._exit(1 if problems else 0)


def main():
    names = sys.argv[1:]
    if names[:1] == ["--one"]:
        return run_one(pathlib.Path(names[1]))
    if not (ROOT / "build" / "notebooks" / "libshardbook.so").exists():
        run_notebooks.die("cling.py: build/ has no libshardbook.so; "
                          "./shardbook notebook --execute builds it")
    passed = []
    for path in run_notebooks.choose(ROOT / "notebooks", names):
        ran = subprocess.run(
            [sys.executable, "-B", __file__, "--one", str(path)],
            env={**os.environ, "EXTRA_CLING_ARGS": "-O1"}, check=False)
        passed.append(ran.returncode == 0)
        print(f"{'ok' if passed[-1] else 'FAILED':7}{path.stem}", flush=True)
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
