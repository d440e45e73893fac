"""Exercises of notebooks: the last cell must know right answers from wrong ones.

An answer replaces a line of a code cell that ends in a comment "// change ..."
or "// write ...". The text below the cell has the solution, and the cell's
metadata list wrong answers:

  "wrong_answers": ["my_bytes = (d - 1) * psi;", ...]

List what a reader writes who has misunderstood something, and answers that are
legal C++ but not legal here. Numbers one thousandth above the solution's are
tried too.
"""

import itertools
import re

PLACE = re.compile(r"^.*// (?:change|write)\b.*$", re.MULTILINE)
SOLUTION = re.compile(r"<summary>Solution</summary>\s*`([^`]+;)`")
ASSIGNED = re.compile(r"(\w+) = ")
VERDICT = re.compile(r"^exercise.*: (right|not yet)$", re.MULTILINE)


def find_answers(notebook):
    """The solutions, the wrong answers to each exercise, and what is missing."""
    solutions = [found for cell in notebook.cells
                 if cell.cell_type == "markdown"
                 for found in SOLUTION.findall(cell.source)]
    places = [cell for cell in notebook.cells if cell.cell_type == "code"
              and PLACE.search(cell.source)]
    problems = []
    if len(solutions) != len(places):
        problems.append(f"there are {len(places)} places for answers, and "
                        f"{len(solutions)} solutions")
    wrong = [cell.metadata.get("wrong_answers", []) for cell in places]
    problems += [f"exercise {number + 1} has no wrong_answers in the metadata "
                 "of its cell" for number, listed in enumerate(wrong)
                 if not listed]
    return solutions, [listed + near_misses(solution)
                       for solution, listed in zip(solutions, wrong)], problems


def near_misses(solution):
    if '"' in solution:
        return []
    return [f"{solution} {name} *= 1.001;"
            for name in ASSIGNED.findall(solution)]


async def execute(client, code):
    """Runs code in a cell of its own; returns what it prints or how it fails."""
    import nbclient.exceptions
    import nbformat

    cell = nbformat.v4.new_code_cell(code)
    last = client.nb.cells[-1]
    try:
        await client.async_execute_cell(cell, len(client.nb.cells) - 1)
    except nbclient.exceptions.CellExecutionError:
        return f"{cell.outputs[-1].ename}: {cell.outputs[-1].evalue}"
    finally:
        client.nb.cells[-1] = last  # the client has put its cell there
    return "".join(output.get("text", "") for output in cell.outputs)


async def judge(client):
    """Answers the exercises of the notebook that `client` has executed.

    Returns what is wrong with them, as texts.
    """
    solutions, wrong, problems = find_answers(client.nb)
    if problems or not solutions:
        return problems
    # Exercises are independent: the last cell judges an answer of each at once.
    rounds = [(solutions, "right")]
    rounds += [(answers, "not yet") for answers in itertools.zip_longest(*wrong)]
    for answers, expected in rounds:
        for answer in filter(None, answers):
            await execute(client, answer)
        printed = await execute(client, client.nb.cells[-1].source)
        verdicts = VERDICT.findall(printed)
        if len(verdicts) != len(answers):
            return problems + ["the last cell has no verdict on each exercise "
                               "after\n" + "\n".join(filter(None, answers)) +
                               "\nbut prints\n" + printed]
        problems += [f"exercise {number}: the last cell calls this answer "
                     f"\"{verdict}\" instead of \"{expected}\":\n{answer}"
                     for number, (answer, verdict)
                     in enumerate(zip(answers, verdicts), 1)
                     if answer and verdict != expected]
    return problems
