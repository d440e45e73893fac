"""Runs chapters and reports on them: ./shardbook run.

  run_chapters.py targets NAME ALL [CHAPTER...] [-- OPTIONS]   what to build
  run_chapters.py run NAME ALL [CHAPTER...] [-- OPTIONS]       runs what was built

Without OPTIONS each chapter runs its rows of chapters/rows.txt. With OPTIONS it
runs once with them, and the output of its program is printed. Neither chapters
nor options: the tables are an overview, unless ALL is not "".

The runs are kept as build/runs/NAME. Without a NAME ("") only the rows of all
chapters are `last`; all else is kept under the names of its chapters, so a look
at one chapter leaves the table of all and its report as they are. What has ended
when a signal comes is kept as NAME-interrupted.
"""

import itertools
import os
import re
import shlex
import signal
import sys
import time

import programs
from chapter_names import (OTHERS, PROGRAMS, find_programs, program_of,
                           title_of)
from default_rows import YARDSTICK, Row, default_rows
from launchers import refuse_copies
from programs import BUILD, Stopped, die, say
from progress import Progress
from report_runs import TABLE, page_of, write_report
from run_folder import (RUNS, keep_folder, known_seconds, new_folder,
                        note_seconds, remove_folder)


def quoted(word):
    """The word as a reader of the shell would type it, in one line."""
    if not word.isprintable():
        octal = "".join(f"\\{byte:03o}" for byte in os.fsencode(word))
        return f"$'{octal}'"
    return shlex.quote(word)


def typed_command(chapter, options=()):
    """What a reader types to run a chapter."""
    words = ["./shardbook", "run", title_of(chapter), "--"]
    return " ".join([*words, *map(quoted, options)])


class Runs:
    """Runs programs; a folder gets the report and the row of each."""

    def __init__(self, folder):
        self.folder = folder
        self.count = 0
        self.num_kept = 0
        self.num_planned = 0
        self.status = 0  # the first that is not 0

    def file(self, name):
        return os.path.join(self.folder, name)

    def add(self, chapter, options):
        """Shows what the program prints."""
        name = self.next_name()
        status = programs.run(
            self.command(name, chapter, options),
            environment={"SHARDBOOK_COMMAND": typed_command(chapter)})
        say(complaint(chapter, status), end="")
        self.keep(name, Row("", chapter, "", options), status)

    def add_rows(self, rows, at_once, progress):
        """Says which rows run, and shows only the errors that they print."""
        first = self.count
        names = [self.next_name() for _ in rows]
        titles = [f"{row.chapter}, {row.label}" for row in rows]
        statuses = [None] * len(rows)
        seconds = [0.0] * len(rows)

        def begin(k):
            seconds[k] = -time.monotonic()
            progress.begin(first + k, titles[k])

        def end(k, errors):
            seconds[k] += time.monotonic()
            progress.end(first + k, titles[k], os.fsdecode(errors)
                         + complaint(rows[k].label, statuses[k]))

        try:
            programs.run_side_by_side(
                [self.command(name, row.chapter, row.options)
                 for name, row in zip(names, rows)],
                at_once, begin, end, output=os.devnull, statuses=statuses)
        finally:
            progress.clear()
            for name, row, status, s in zip(names, rows, statuses, seconds):
                if status is not None and self.keep(name, row, status):
                    note_seconds(self.folder, s,
                                 typed_command(row.chapter, row.options))

    def next_name(self):
        self.count += 1
        return f"{self.count:02}.json"

    def command(self, name, chapter, options):
        return [os.path.join(BUILD, program_of(chapter)),
                "--report", self.file(name), *options]

    def keep(self, name, row, status):
        """Whether the program has left a report, which is kept."""
        report = self.file(name)
        self.status = self.status or status
        if status < 2 and os.path.exists(report) and os.path.getsize(report):
            self.add_row(name, row.title, row.star + row.label,
                         typed_command(row.chapter, row.options))
            self.num_kept += 1
            return True
        if os.path.exists(report):
            os.unlink(report)
        return False

    def add_row(self, *cells):
        with open(self.file("rows.tsv"), "ab") as rows:
            rows.write(os.fsencode("\t".join(cells) + "\n"))


def complaint(label, status):
    """Names an unusual status; up to 3, the program itself has explained it."""
    if status <= 3:
        return ""
    try:
        number = signal.Signals(status - 128).name.removeprefix("SIG")
    except ValueError:
        number = status - 128
    end = (f"was ended by signal {number}" if status > 128 else
           f"ended with status {status}")
    return f"shardbook: {label} {end}\n"


def gloo_is_built():
    """Gloo is in the build when something is linked with it."""
    with open(os.path.join(BUILD, "build.ninja"), "rb") as file:
        return b"libgloo" in file.read()


def uses_gloo(row):
    return "--backend gloo" in " ".join(row.options)


def is_simulated(row):
    return "--backend sim" in " ".join(row.options)


def shares_of_time(rows, cores):
    """Seconds in the last run; rows that it had not count as much on average.

    Simulated rows share the cores.
    """
    known = known_seconds("last")
    seconds = [known.get(typed_command(row.chapter, row.options))
               for row in rows]
    found = [s for s in seconds if s is not None] or [1]
    mean = sum(found) / len(found)
    return [(mean if s is None else s) / (cores if is_simulated(row) else 1)
            for s, row in zip(seconds, rows)]


def run_default_rows(runs, chapters):
    rows = default_rows(chapters)
    on_gloo = [row for row in rows if uses_gloo(row)]
    if on_gloo and not gloo_is_built():
        for row in on_gloo:
            say(f"skipping {row.chapter}, {row.label}, gloo: this build has no "
                "Gloo (package libgloo-dev)")
        rows = [row for row in rows if row not in on_gloo]
    run_rows(runs, rows)


def run_rows(runs, rows):
    """Measured rows one by one, and simulated ones on all cores."""
    runs.num_planned = len(rows)
    cores = len(os.sched_getaffinity(0))
    progress = Progress(shares_of_time(rows, cores))
    for simulated, group in itertools.groupby(rows, is_simulated):
        runs.add_rows(list(group), cores if simulated else 1, progress)


def is_quiet(chapters, options):
    """Whether the programs' own output is the result, and no table is needed."""
    if options is None:
        return False
    return len(chapters) == 1 or any(option.startswith("--format")
                                     for option in options)


def read_words(words):
    """The programs, and the options, None without a --."""
    if "--" not in words:
        return find_programs(words or [*find_programs([]), *PROGRAMS]), None
    end = words.index("--")
    return find_programs(words[:end]), words[end + 1:]


def uses_gpu(options):
    pairs = zip(options, options[1:])
    return ("--device", "cuda") in pairs or "--device=cuda" in options


def other_command(name, words):
    """The command of one of OTHERS; None for words that name another program."""
    if not words or words[0] not in OTHERS:
        return None
    if words[1:] and words[1] != "--":
        die(f"run {words[0]}: {words[1]}: give its options after --")
    if name:
        die(f"run {words[0]}: --name {name}: it keeps no run")
    return [os.path.join(BUILD, "chapters", words[0]), *words[2:]]


def default_name(words):
    if not words:
        return "last"
    if words[0] == "--":
        return "all"
    chapters, _ = read_words(words)
    return "-".join(map(title_of, chapters))


def check_name(name):
    if name and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        die(f"--name {name}: give letters, digits, '.', '_' and '-'")


def say_what_comes():
    """The first line of a run of all chapters, before anything is built."""
    known = known_seconds("last")
    if known:
        minutes = int(sum(known.values()) // 60) + 1
        say("This builds what has changed, runs all chapters again (last time "
            f"{minutes} min), and replaces build/runs/last and "
            "build/report.html.")
    else:
        say("This installs what is missing, builds, and runs all chapters: "
            "five to ten minutes on two cores.")


def print_targets(name, _, *words):
    check_name(name)
    if not name and not words:
        say_what_comes()
    if other := other_command(name, words):
        refuse_copies("run", os.path.join("chapters", words[0]), other[1:])
        needed = ["gpu_libraries"] if uses_gpu(other) else []
        print(os.path.join("chapters", words[0]), *needed, sep="\n")
        return
    chapters, options = read_words(words)
    refuse_copies("run", program_of(chapters[0]), map(quoted, options or []))
    needed = [program_of(chapter) for chapter in chapters]
    if options is None:
        needed.append(program_of(YARDSTICK))
    # Libraries that programs load, and are not linked with
    if uses_gpu(options or []):
        needed.append("gpu_libraries")
    needed.append("lesson_needs")  # after a run, a lesson answers soon
    print(TABLE, *needed, sep="\n")


def run_all(runs, chapters, options):
    if options is None:
        run_default_rows(runs, chapters)
    else:
        runs.num_planned = len(chapters)
        for chapter in chapters:
            runs.add(chapter, options)


def say_what_is_next(chapters):
    """The first chapter's lesson; after a run of all, one and the planner."""
    title = title_of(chapters[0]) if chapters else "ddp"
    if title not in PROGRAMS:
        say(f"Read it:  ./shardbook lesson {title}, then exercise and mistake")
    if not chapters:
        say("Plan it:  ./shardbook plan --model gpt-13b --nodes 8 --batch 1024")


def keep_runs(name, run_all, at_least=1):
    """Calls run_all(runs), and keeps the runs as `name`, if they are enough.

    Returns the runs, the folder that keeps them, and the signal that came. The
    last two may be None. What has ended when a signal comes is kept.
    """
    folder = new_folder()
    kept = stopped = None
    try:
        runs = Runs(folder)
        try:
            run_all(runs)
        except Stopped as signal_came:
            stopped = signal_came
        if runs.num_kept >= at_least:
            if stopped:
                runs.add_row(f"# Interrupted after {runs.num_kept} of "
                             f"{runs.num_planned} runs.")
                name += "-interrupted"
            if os.path.exists(os.path.join(RUNS, name)):
                say(f"Replaced: the run before, in build/runs/{name} (--name "
                    "NAME keeps both)")
            kept = keep_folder(folder, name)
    finally:
        remove_folder(folder)
    return runs, kept, stopped


def run_and_report(name, all_rows, *words):
    if other := other_command(name, words):
        return programs.run(
            other, environment={"SHARDBOOK_COMMAND": typed_command(words[0])})
    chapters, options = read_words(words)
    # Some options, such as --help, leave nothing to report.
    runs, kept, stopped = keep_runs(
        name or default_name(words),
        lambda runs: run_all(runs, chapters, options))
    status = 0
    if kept:
        how = (["--quiet"] if is_quiet(chapters, options) else
               [] if all_rows or words else ["--overview"])
        status = write_report([kept], page_of(os.path.basename(kept)), how)
        say_what_is_next(chapters if words else [])
    if stopped:
        raise stopped
    return runs.status or status


if __name__ == "__main__":
    programs.main(print_targets, run_and_report)
