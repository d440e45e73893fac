"""Reads chapters/rows.txt: the rows that run without options."""

import collections
import os

from programs import ROOT

YARDSTICK = "00_single_device"

# The star of a row that the overview shows, too
STAR = "*"

Row = collections.namedtuple("Row", "title chapter label options star",
                             defaults=[""])
_Group = collections.namedtuple("_Group", "title options rows")


def default_rows(chosen):
    """The rows of the chosen chapters.

    A group of simulated rows also has its run on one device, the yardstick.
    """
    rows = []
    for group in _read_groups():
        has_chosen = any(chapter in chosen for chapter, _, _ in group.rows)
        needs_yardstick = group.title and has_chosen
        for chapter, label, options in group.rows:
            if chapter in chosen or (needs_yardstick and chapter == YARDSTICK):
                options = f"{group.options} {options}".split()
                star = STAR if label.startswith(STAR) else ""
                rows.append(Row(group.title, chapter, label[len(star):],
                                options, star))
    return rows


def _read_groups():
    """Reads the groups: [Title] and options, then rows with their own options."""
    groups = [_Group("", "", [])]
    with open(os.path.join(ROOT, "chapters", "rows.txt"), "rb") as file:
        lines = os.fsdecode(file.read()).split("\n")
    for line in lines:
        if line.startswith("#") or not line.strip():
            continue
        if line.startswith("["):
            title, _, options = line[1:].partition("]")
            if title == "Proof":
                title = ""  # The first table has none.
            groups.append(_Group(title, options, []))
        else:
            cells = [cell.strip() for cell in line.split("|", 2)]
            groups[-1].rows.append(cells + [""] * (3 - len(cells)))
    return groups
