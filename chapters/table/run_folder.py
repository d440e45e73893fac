"""The folder of a run, build/runs/NAME: a report per program, and rows.tsv.

Rows of chapters/rows.txt also leave seconds.tsv: how long each command took.

A run writes into a folder of its own, which gets its name when all is done: two
runs at a time do not see each other, and a name never holds half a run.
"""

import os

from programs import BUILD, die

RUNS = os.path.join(BUILD, "runs")


def new_folder(prefix=".new-"):
    """An empty folder under a name that no other run has."""
    folder = os.path.join(RUNS, prefix + os.urandom(6).hex())
    os.makedirs(folder, mode=0o700)
    return folder


def remove_folder(folder):
    if os.path.exists(folder):
        import shutil  # here because its import takes milliseconds
        shutil.rmtree(folder, ignore_errors=True)


def keep_folder(folder, name):
    """Moves the folder to its name, and removes the folder that had the name.

    If another run does the same at this moment, it tries again.
    """
    target = os.path.join(RUNS, name)
    for _ in range(100):
        if _moves(folder, target):
            return target
        old = new_folder(".old-")
        _moves(target, old)
        remove_folder(old)
    return die(f"build/runs/{name}: these runs cannot be kept there")


def _moves(source, target):
    try:
        os.rename(source, target)
    except OSError:
        return False
    return True


def note_seconds(folder, seconds, command):
    with open(os.path.join(folder, "seconds.tsv"), "ab") as file:
        file.write(os.fsencode(f"{seconds:.2f}\t{command}\n"))


def known_seconds(name):
    """How long the commands of a kept run took."""
    try:
        with open(os.path.join(RUNS, name, "seconds.tsv"), "rb") as file:
            lines = os.fsdecode(file.read()).splitlines()
    except OSError:
        return {}
    pairs = (line.split("\t", 1) for line in lines)
    return {command: float(seconds) for seconds, command in pairs}
