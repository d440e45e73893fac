#!/usr/bin/env python3
"""Changes one line of each exercise's solution, and asks whether the judge
notices.

    tests/by_hand/judge_changes.py [--only CHAPTER]... [--changes N] [--seed N]
    tests/by_hand/judge_changes.py --solutions | --mistakes [--only CHAPTER]...

A change deletes a line between the marks, exchanges two, changes a constant or
an operator, or drops an argument. It alters a result when weights (bits), loss,
calls or their order differ on one of twenty tasks, which judge_changes.h runs
apart from the judge; or when a rank throws or never ends. The script prints for
each chapter how many changes were drawn, compile, alter a result and are caught,
and shows those that are not. Exit status: 0 when at least 98 % are caught.

--solutions judges the lessons on the twenty tasks; --mistakes asks whether each
mistake is caught, and named by its hint. They exit with 0 when all are.

It uses the build folder build, whose lessons are current, and writes below
build/changes.
"""

import collections
import concurrent.futures
import os
import pathlib
import random
import re
import signal
import subprocess
import sys

sys.dont_write_bytecode = True
from book import CHAPTERS, ROOT, parser  # noqa: E402

sys.path.insert(0, str(ROOT / "chapters" / "course"))  # its judge, not ours
import judge as course  # noqa: E402
import texts  # noqa: E402

FOLDER = pathlib.Path(texts.BUILD, "changes")
SECONDS, CPU_SECONDS, MEMORY_KIB = 120, 10, 8 << 20  # of a program
PER_SOURCE, ENOUGH = 40, 0.98

# ---- The changes

OTHERS = {"<": ["<=", ">"], "<=": ["<", ">="], ">": [">=", "<"],
          ">=": [">", "<="], "==": ["!="], "!=": ["=="], "+": ["-", "*"], "-": ["+"],
          "*": ["+", "/"], "/": ["*"], "%": ["/"], "+=": ["-=", "="],
          "-=": ["+="], "&&": ["||"], "||": ["&&"]}
WORDS = {"kSum": ["kMax", "kMin"], "true": ["false"], "false": ["true"],
         "min": ["max"], "max": ["min"], "rank()": ["rank() + 1", "rank() - 1"],
         "size()": ["size() + 1", "size() - 1"], "++": ["--"], "--": ["++"]}


def arguments(code):
    """Begin and end of each argument of the calls and lists in a line."""
    opened = []
    for at, letter in enumerate(code):
        if letter in "([{":
            opened.append([at + 1])
        elif letter == "," and opened:
            opened[-1].append(at + 1)
        elif letter in ")]}" and opened:
            begins = opened.pop()
            yield from zip(begins, [b - 1 for b in begins[1:]] + [at])


def changes_of_line(line):
    """The line with one thing changed; a comment behind it stays."""
    def instead(begin, end, word):
        return line[:begin] + word + line[end:]

    code = line.split("//")[0]
    yield ""
    for each in re.finditer(r"(?<![\w.])\d+(\.\d+)?(?![\w.])", code):
        for other in {"0", "1", "2", f"{each[0]} + 1", f"{each[0]} - 1"}:
            if other != each[0]:
                yield instead(*each.span(), other)
    for each in re.finditer(r"(?<= )[-+*/<>=!%&|]+(?= )", code):
        for other in OTHERS.get(each[0], []):
            yield instead(*each.span(), other)
    for word, others in WORDS.items():
        ends = r"\b" if word[-1].isalpha() else ""
        for each in re.finditer(("" if word in "++--" else r"\b")
                                + re.escape(word) + ends, code):
            for other in others:
                yield instead(*each.span(), other)
    for begin, end in arguments(code):
        if code[begin:end].strip():
            # With its comma: the one before it, or else the one behind
            first = begin - (code[begin - 1] == ",")
            yield instead(first, end + (first == begin and code[end] == ","), "")


def changes_of(lesson):
    """All lessons with one change, in their order."""
    before, rest = lesson.split(texts.BEGIN)
    strategy, after = rest.split(texts.END)
    lines = strategy.splitlines()
    is_code = [bool(line.split("//")[0].strip()) for line in lines]
    changed = []
    for k, line in enumerate(lines):
        if not is_code[k]:
            continue
        changed += [lines[:k] + [other] + lines[k + 1:]
                    for other in sorted(set(changes_of_line(line)) - {line})]
        changed += [[*lines[:k], lines[m], *lines[k + 1:m], line, *lines[m + 1:]]
                    for m in range(k + 1, min(k + 4, len(lines)))
                    if is_code[m] and lines[m].strip() != line.strip()]
    return [before + texts.BEGIN + "\n".join(each) + "\n" + texts.END + after
            for each in changed]


def is_balanced(text):
    """Without this, one change's brackets would end another's namespace."""
    closed = {")": "(", "]": "[", "}": "{"}
    opened = []
    for letter in re.sub(r'R"\((?s:.*?)\)"|//.*|"[^"\n]*"', "", text):
        if letter in "([{":
            opened.append(letter)
        elif letter in closed and (not opened or opened.pop() != closed[letter]):
            return False
    return not opened


# ---- Programs

def compile_all(chapter, named, program):
    """Compiles lessons into one program; leaves out those with errors. Returns
    the names of its lessons, by number; the first is the lesson itself."""
    named = list(named)
    log = pathlib.Path(texts.BUILD, program + ".log")
    while True:
        source, calls = texts.in_one_source(chapter, named)
        source += ('#include "tests/by_hand/judge_changes.h"\n'
                   "int main(int argc, char** argv) {\n"
                   "  return shardbook::judge_changes::run({\n" + "".join(
                       f"      [] {{ return {call}; }},\n" for call in calls)
                   + "  }, {argv, argv + argc});\n}\n")
        path = texts.write(FOLDER / f"{program.replace('/', '_')}.cpp", source)
        if not course.compile_lesson(chapter, path, program,
                                     ["-fmax-errors=0"]):
            return ["", *(name for name, _ in named)]
        output = log.read_text("utf-8", errors="replace")
        wrong = set(re.findall(r"lesson\.cpp: (\w+):\d+.*(?:error|required from "
                               r"here)", output))
        if not wrong & {name for name, _ in named}:
            sys.exit(output[:2000])
        named = [each for each in named if each[0] not in wrong]


def run(program, *words):
    """Its output and status; a program that never ends is stopped."""
    ended = subprocess.run(
        ["sh", "-c", f"ulimit -v {MEMORY_KIB}; ulimit -t {CPU_SECONDS}; exec "
         f'nice timeout -s KILL {SECONDS} "$@"', "sh",
         os.path.join(texts.BUILD, program), *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, errors="replace",
        cwd=texts.BUILD, check=False,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"})
    return ended.stdout, ended.returncode


def first_difference(output, status, expected):
    """What differs first from the lesson's results, or None."""
    lines = output.splitlines()
    for ours, theirs in zip(lines, expected):
        if ours != theirs:
            return f"task {ours}; the lesson: {theirs}"
    if status or len(lines) != len(expected):
        return f"the program ends with status {status}"
    return None


def try_changes(chapter, number, seed):
    """Prints a chapter's row; returns how many changes alter a result, and how
    many of them are caught."""
    lesson = texts.lesson_of(chapter)
    changed = changes_of(lesson)
    drawn = random.Random(seed).sample(changed, min(number, len(changed)))
    named = [(f"v{k}", text) for k, text in enumerate(drawn)
             if is_balanced(text)]
    count = collections.Counter(drawn=len(drawn))
    missed = []

    def try_one(program, k, name, expected):
        output, status = run(program, "compute", k, expected)
        difference = first_difference(
            output, status, expected.read_text("utf-8").splitlines())
        caught = difference and run(program, "judge", k)[1] != 0
        return name, difference, caught

    for first in range(0, len(named), PER_SOURCE):
        program = f"chapters/changes_{chapter}"
        names = compile_all(chapter, named[first:first + PER_SOURCE], program)
        count["compiled"] += len(names) - 1
        expected = FOLDER / f"{chapter}.txt"
        if first == 0:
            output, status = run(program, "compute", 0)
            if status:
                sys.exit(f"{chapter}: the lesson ends with {status}\n{output}")
            expected.write_text(output, "utf-8")
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            tried = pool.map(lambda each: try_one(program, *each, expected),
                             list(enumerate(names))[1:])
            for name, difference, caught in tried:
                count["altering"] += bool(difference)
                count["caught"] += bool(caught)
                if difference and not caught:
                    missed.append((name, difference))
    print(f"| {chapter} | {len(changed)} | " + " | ".join(
        str(count[each]) for each in ("drawn", "compiled", "altering", "caught"))
        + " |", flush=True)
    for name, difference in missed:
        print(texts.difference(lesson, dict(named)[name],
                               ("the lesson", f"{chapter}, not caught"))
              + f"\n{difference}\n", flush=True)
    return count["altering"], count["caught"]


# ---- Solutions and mistakes

def try_solution(chapter):
    program = f"chapters/changes_{chapter}"
    compile_all(chapter, [], program)
    output, status = run(program, "sizes", 0)
    print(f"{chapter}: " + (f"fails\n{output}" if status else
                            "holds on twenty tasks"), flush=True)
    return 1, status == 0


def try_mistakes(chapter):
    program = f"chapters/planted_{chapter}"
    names = compile_all(
        chapter, [(name.replace("-", "_"), text)
                  for name, text in texts.planted_in(chapter)], program)
    num_named = 0
    for k, name in enumerate(names):
        failed = course.failing(run(program, "judge", k)[0])
        said = course.hint(chapter, failed)
        is_named = re.search(rf"\b{name.replace('_', '-')}\b", said)
        if k > 0 and failed and is_named:
            num_named += 1
        elif k > 0:
            print(f"{chapter}, {name}: fails {failed}; the hint: {said}")
    print(f"{chapter}: {num_named} of {len(names) - 1} mistakes are caught and "
          "named", flush=True)
    return len(names) - 1, num_named


def main():
    line = parser(__doc__)
    line.add_argument("--only", action="append", metavar="CHAPTER",
                      help='"02", as often as you like')
    line.add_argument("--changes", type=int, default=200, metavar="N",
                      help="draw so many of each chapter (default 200)")
    line.add_argument("--seed", type=int, default=0, metavar="N")
    line.add_argument("--solutions", action="store_true")
    line.add_argument("--mistakes", action="store_true")
    args = line.parse_args()
    unknown = set(args.only or []) - set(CHAPTERS)
    if unknown:
        line.error(f"--only {min(unknown)}: there are {', '.join(CHAPTERS)}")
    chapters = [CHAPTERS[each] for each in args.only or sorted(CHAPTERS)]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # programs.run
    course.limits.COMPILE_SECONDS *= 20  # for many lessons in one source
    whole = caught = 0
    if not (args.solutions or args.mistakes):
        print("| chapter | changes | drawn | compile | alter a result | caught |"
              "\n|---|---|---|---|---|---|")
    for chapter in chapters:
        these = (try_solution(chapter) if args.solutions else
                 try_mistakes(chapter) if args.mistakes else
                 try_changes(chapter, args.changes, args.seed))
        whole, caught = whole + these[0], caught + these[1]
    print(f"{caught} of {whole}")
    enough = 1 if args.solutions or args.mistakes else ENOUGH
    return 0 if caught >= enough * whole else 1


if __name__ == "__main__":
    sys.exit(main())
