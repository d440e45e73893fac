"""Executes notebooks with the solutions of their exercises filled in.

  /usr/bin/python3 tests/notebooks/solutions.py BUILD [NAME...]

The last cell of a notebook checks the reader's answers. Here a line of a cell
that ends in a comment "// change ..." or "// write ..." is replaced by the code
of the next solution, and every verdict must be "right". Exit status: 0, or 1
when a solution is not.
"""

import asyncio
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "notebooks"))
import run_notebooks  # noqa: E402

PLACE = re.compile(r"^.*// (?:change|write)\b.*$", re.MULTILINE)
SOLUTION = re.compile(r"<summary>Solution</summary>\s*`([^`]+;)`")


def fill_in(notebook):
    """Returns how many places there were, and how many solutions."""
    solutions = [found for cell in notebook.cells
                 if cell.cell_type == "markdown"
                 for found in SOLUTION.findall(cell.source)]
    left = list(solutions)
    places = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        places += len(PLACE.findall(cell.source))
        cell.source = PLACE.sub(
            lambda line: left.pop(0) if left else line[0], cell.source)
    return places, len(solutions)


async def verdicts(path, notebook):
    import nbclient

    client = nbclient.NotebookClient(
        notebook, timeout=run_notebooks.CELL_LIMIT_S, kernel_name="xcpp17",
        record_timing=False, resources={"metadata": {"path": path.parent}})
    await client.async_execute()
    text = "".join(output.get("text", "")
                   for output in notebook.cells[-1].get("outputs", []))
    return text.splitlines()


def is_solved(path):
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    places, solutions = fill_in(notebook)
    lines = asyncio.run(verdicts(path, notebook))
    good = (places == solutions > 0 and lines
            and all(line.endswith(": right") for line in lines))
    print(f"{'ok' if good else 'FAILED':7}{path.stem:24}{solutions} solutions "
          f"for {places} places: {'; '.join(lines)}", flush=True)
    return good


def main():
    build, *names = sys.argv[1:]
    run_notebooks.use_own_kernel(pathlib.Path(build).resolve())
    paths = run_notebooks.choose(ROOT / "notebooks", names)
    return 0 if all([is_solved(path) for path in paths]) else 1


if __name__ == "__main__":
    sys.exit(main())
