"""Hints, in chapters/NN_name/hints.txt: for each function of the strategy two to
four, from the idea to the call.

  == the exercise
  What is said when it begins.

  == FUNCTION
  A hint of one or two sentences. A blank line ends it.
"""

import os
import re

import texts
from texts import read, write

from chapter_names import title_of


def hints_of(chapter):
    """The hints of each function, by its name."""
    hints = {}
    for part in re.split(r"^== ", read("chapters", chapter, "hints.txt"),
                         flags=re.M)[1:]:
        name, text = part.split("\n", 1)
        hints[name] = text.strip().split("\n\n")
    hints.pop("the exercise", None)
    return hints


def next_hint(chapter, step):
    """The next hint of a step. How many have been shown is kept beside the
    exercise."""
    title = title_of(chapter)
    path = os.path.join(texts.WORK, f".{title}.hints")
    lines = read(path).splitlines() if os.path.exists(path) else []
    shown = lines.count(step.name)
    hints = hints_of(chapter)[step.name]
    if shown >= len(hints):
        return (f"{step.name}: no hint is left; ./shardbook exercise {title} "
                f"--solution --step {step.number} shows the function")
    write(path, "".join(line + "\n" for line in [*lines, step.name]))
    return f"{step.name}, hint {shown + 1} of {len(hints)}:\n{hints[shown]}"
