"""The judge of the course: compiles one file in place of its lesson, runs it, and
reads which claims fail; a mistake with the same numbers is named as a hint."""

import collections
import contextlib
import fcntl
import os
import re
import secrets
import shlex
import subprocess

import limits
import texts
from texts import (END, in_one_source, planted_in, read,  # first: finds table/
                   with_end_of_lesson, write)

import programs
from chapter_names import title_of
from meant import meant
from programs import BUILD, ROOT, say

# What a lesson may use beside core, comm and chapters/common (meson.build)
ALSO_LINKED = {"13_moe": ", 03, 07 and 13", "14_hybrid_3d": " and 07",
               "15_engine": " and all chapters"}


def command_of(target):
    """What Ninja runs for a target, as words."""
    ninja = ["ninja", "-C", BUILD, "-t", "commands", "-s", target]
    text = subprocess.run(ninja, stdout=subprocess.PIPE, text=True, check=True)
    return shlex.split(text.stdout.strip().splitlines()[-1])


def run_logged(command, log, is_alone=False, word=""):
    """Runs a command in the build folder, within limits; returns its status and
    its output."""
    status = programs.run(
        ["env", "-C", BUILD, *limits.command(log, command, is_alone)],
        environment={"OMP_WAIT_POLICY": "passive", "SHARDBOOK_JUDGE": word})
    with open(log, encoding="utf-8", errors="replace") as file:
        return status, file.read().replace(ROOT + os.sep, "")


def replaced(words, values):
    """The words, with other values after options such as -o."""
    words = list(words)
    for option, value in values.items():
        words[words.index(option) + 1] = value
    return words


def compile_lesson(chapter, source, program, flags=()):
    """Compiles `source` in place of the lesson; says why where it cannot, or ""."""
    target = f"chapters/lesson_{chapter}"
    link = command_of(target)
    lesson_object = next(word for word in link if word.endswith("lesson.cpp.o"))
    own_object, log = program + ".o", os.path.join(BUILD, program + ".log")
    compiler = replaced(command_of(lesson_object),
                        {"-o": own_object, "-MF": own_object + ".d"})
    compiler[-1] = source
    # What the compiler calls it, after #line
    name = (re.match('\n?#line 1 "(.*)"', read(source)) or ["", source])[1]
    name = name.replace(ROOT + os.sep, "")
    status, output = run_logged(
        [*compiler, "-fdiagnostics-color=never", "-Werror=unused-result", *flags],
        log)
    if status:
        output = output.replace(os.path.relpath(source, BUILD), name)
        first = re.search(rf"^{re.escape(name)}:\d+.*error.*", output, re.M)
        output = output[first.start():] if first else output
        return (f"{name} does not compile:\n"
                + ("\n".join([*output.splitlines()[:12], *meant(output)[:3]])
                   or f"the compiler ended with status {status}; it may need "
                      f"{limits.COMPILE_SECONDS} s and "
                      f"{limits.COMPILE_BYTES >> 30} GiB"))
    status, output = run_logged(
        replaced([own_object if word == lesson_object else word
                  for word in link], {"-o": program}), log)
    if status:
        missing = re.findall(r"undefined reference to [`'](.*)'", output)
        return (f"{name} links only core, comm and chapters/common"
                f"{ALSO_LINKED.get(chapter, '')}; it has no "
                + ("\n".join(dict.fromkeys(missing[:3])) or output))
    return ""


# What the judge says of a file: the claims of the verdict, name, state ("holds",
# "FAILS", "later") and text; all that the program printed; a sentence where there
# is no verdict; and whether it compiled.
Judgement = collections.namedtuple("Judgement", "claims output error compiled")


@contextlib.contextmanager
def program_of(kind, chapter):
    """The name of a program, of which several may be made at once; it is removed
    in the end."""
    program = f"chapters/{kind}_{chapter}_{os.getpid()}"
    try:
        yield program
    finally:
        for suffix in ("", ".cpp", ".o", ".o.d", ".log"):
            path = os.path.join(BUILD, program + suffix)
            if os.path.exists(path):
                os.remove(path)


def judged(chapter, source, kind):
    """Compiles and runs a file."""
    with program_of(kind, chapter) as program:
        if kind == "exercise":
            text = with_end_of_lesson(chapter, source)
            if not text:
                return Judgement([], "", f"{source} has no line " + END.strip(),
                                 False)
            source = write(os.path.join(BUILD, program + ".cpp"), text)
        error = compile_lesson(chapter, source, program)
        return (Judgement([], "", error, False) if error else
                run_judged(program))


def run_judged(program, *words):
    """Runs a program that begins with compare()."""
    # By this word compare() begins; a program that ends before, or prints a
    # verdict of its own, does not know it
    word = secrets.token_hex(16)
    status, output = run_logged([os.path.join(BUILD, program), *words],
                                os.path.join(BUILD, program + ".log"),
                                is_alone=True, word=word)
    printed, _, verdict = output.partition(word + "\n")
    lines = re.match(r"(?:\w+ +(?:holds|FAILS|later)  .*\n)*", verdict)[0]
    claims = re.findall(r"(\w+) +(\w+)  (.*)\n", lines)
    error = limits.reason(status)
    if not error and "bad_alloc" in output:
        error = f"asked for more than {limits.RUN_BYTES >> 30} GiB of memory"
    elif not error and status > 128:
        error = (f"the program ended by signal {status - 128}: a tensor that has "
                 "no values, or an index beyond the end")
    elif not error and not (claims and status in (0, 1)):
        error = f"the program ended with status {status} before it was judged"
    return Judgement([] if error else claims, printed + verdict, error, True)


def judge(chapter, source, kind):
    """Prints what becomes of a file; the claims that fail, each with what the
    judge says of it, or None if there are no claims; and whether it compiled."""
    result = judged(chapter, source, kind)
    print(result.output, end="", flush=True)
    if result.error:
        say(result.error)
    return None if result.error else failed_of(result.claims), result.compiled


def failed_of(claims):
    return {name: text for name, state, text in claims if state == "FAILS"}


def failing(output):
    return dict(re.findall(r"^(\w+) +FAILS +(.*)", output, re.M))


# ---- Hints: a mistake with the numbers of the reader's program.

def judged_mistakes(chapter):
    """The claims that fail, by mistake. They are computed when first asked for,
    and again when the lesson, a mistake or the book's libraries change."""
    library = os.path.join(BUILD, "chapters/common/libshardbook_chapters.so")
    mistakes = planted_in(chapter)
    source, calls = in_one_source(chapter, mistakes)
    source += "#include <cstdio>\nint main() {\n" + "".join(
        f'  std::printf("== {name}\\n%s", judge({call}).text.c_str());\n'
        for (name, _), call in zip(mistakes, calls[1:])) + "}\n"
    path = os.path.join(texts.OUT, "mistakes", title_of(chapter), "all.cpp")
    log = path[:-4] + ".txt"
    if not (os.path.exists(log) and read(path) == source
            and os.path.getmtime(log) > os.path.getmtime(library)):
        program = f"chapters/mistakes_{chapter}"
        write(path, source)
        if compile_lesson(chapter, path, program):
            return {}
        run_logged([os.path.join(BUILD, program)], log)
    parts = re.split(r"^== (.*)\n", read(log), flags=re.M)
    return dict(zip(parts[1::2], map(failing, parts[2::2])))


# What two programs have in common, and the part of the judge's words that says so
SAME = {"ends": ("your ranks end as those", r".*"),
        "numbers": ("your loss is that", r"[^,]*"),
        "bytes": ("your bytes are those", r"[^;]*"),
        "memory": ("your peak is that", r"[^;]*"),
        "waits": ("your waits are those", r"[^;]*"),
        "sizes": ("on other sizes, your program does the same as that", r".*")}


def hint(chapter, failed):
    """Names the mistakes that fail most like the reader's program, or ""."""
    if not failed or "is empty: write it" in failed.get("ends", ""):
        return ""

    def same_part(claim, text):
        # Which rank throws first, and at which row, may depend on time
        number = r"\d+" if claim == "ends" else r"(?<=rank )\d+"
        text = re.sub(number, "", re.match(SAME[claim][1], text)[0])
        return sorted(re.findall(r"[^\s,;]+", text))

    # Of several judges at once, one computes what the mistakes do
    lock = os.path.join(BUILD, f"chapters/mistakes_{chapter}.lock")
    with open(lock, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        mistakes = judged_mistakes(chapter)
    alike = {name: [claim for claim in failed if claim in theirs and
                    same_part(claim, failed[claim]) ==
                    same_part(claim, theirs[claim])]
             for name, theirs in mistakes.items()}
    claims = max(alike.values(), key=len, default=[])
    names = [name for name in alike if claims and alike[name] == claims]
    return (f"{SAME[claims[0]][0]} of {' or '.join(names)}: see ./shardbook "
            f"mistake {title_of(chapter)} {names[0]}") if names else ""
