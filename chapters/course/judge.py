"""The judge of the course: compiles one file in place of its lesson, runs it, and
reads which claims fail; a mistake with the same numbers is named as a hint."""

import os
import re
import shlex
import subprocess

import texts
from texts import in_one_source, planted_in, read, write  # first: finds table/

import programs
from chapter_names import title_of
from programs import BUILD, ROOT, say

RUN_SECONDS, COMPILE_SECONDS = 5, 60
# What a lesson may use beside core, comm and chapters/common (meson.build)
ALSO_LINKED = {"13_moe": ", 03, 07 and 13", "14_hybrid_3d": " and 07",
               "15_engine": " and all chapters"}


def command_of(target):
    """What Ninja runs for a target, as words."""
    ninja = ["ninja", "-C", BUILD, "-t", "commands", "-s", target]
    text = subprocess.run(ninja, stdout=subprocess.PIPE, text=True, check=True)
    return shlex.split(text.stdout.strip().splitlines()[-1])


def run_logged(command, log, seconds):
    """Runs a command in the build folder; returns its status and its output."""
    status = programs.run(
        ["timeout", "--kill-after=1", str(seconds), "sh", "-c",
         'cd "$0" && exec "$@" >"$LOG" 2>&1', BUILD, *command],
        environment={"LOG": log, "OMP_WAIT_POLICY": "passive"})
    with open(log, encoding="utf-8", errors="replace") as file:
        return status, file.read().replace(ROOT + os.sep, "")


def replaced(words, values):
    """The words, with other values after options such as -o."""
    words = list(words)
    for option, value in values.items():
        words[words.index(option) + 1] = value
    return words


def compile_lesson(chapter, source, program, flags=()):
    """Compiles `source` in place of the lesson; says why where it cannot."""
    target = f"chapters/lesson_{chapter}"
    link = command_of(target)
    lesson_object = next(word for word in link if word.endswith("lesson.cpp.o"))
    own_object, log = program + ".o", os.path.join(BUILD, program + ".log")
    compiler = replaced(command_of(lesson_object),
                        {"-o": own_object, "-MF": own_object + ".d"})
    compiler[-1] = source
    name = source.replace(ROOT + os.sep, "")
    status, output = run_logged(
        [*compiler, "-fdiagnostics-color=never", *flags], log, COMPILE_SECONDS)
    if status:
        output = output.replace(os.path.relpath(source, BUILD), name)
        first = re.search(rf"^{re.escape(name)}:\d+.*error.*", output, re.M)
        output = output[first.start():] if first else output
        say(f"{name} does not compile:\n" + "\n".join(output.splitlines()[:12]))
        return False
    status, output = run_logged(
        replaced([own_object if word == lesson_object else word
                  for word in link], {"-o": program}), log, COMPILE_SECONDS)
    if status:
        missing = re.findall(r"undefined reference to [`'](.*)'", output)
        say(f"{name} links only core, comm and chapters/common"
            f"{ALSO_LINKED.get(chapter, '')}; it has no "
            + ("\n".join(dict.fromkeys(missing[:3])) or output))
        return False
    return True


def judge(chapter, source, kind):
    """Compiles and runs a file; the claims that fail, each with what the judge
    says of it, or None if there are no claims."""
    program = f"chapters/{kind}_{chapter}"
    if not compile_lesson(chapter, source, program):
        return None
    status, output = run_logged([os.path.join(BUILD, program)],
                                os.path.join(BUILD, program + ".log"),
                                RUN_SECONDS)
    print(output, end="", flush=True)
    if status in (124, 137):
        say(f"stopped after {RUN_SECONDS} s: a loop that never ends, or a rank "
            "that the others wait for")
        return None
    if status > 1:
        say(f"the program ended by signal {status - 128}: a tensor that has no "
            "values, or an index beyond the end" if status > 128 else
            f"the program ended with status {status}")
        return None
    return failing(output)


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
        if not compile_lesson(chapter, path, program, ["-O0"]):
            return {}
        run_logged([os.path.join(BUILD, program)], log, 4 * RUN_SECONDS)
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
    """Names the mistakes that fail most like the reader's program, if any do."""
    if not failed or "is empty: write it" in failed.get("ends", ""):
        return

    def same_part(claim, text):
        # Which rank throws first, and at which row, may depend on time
        number = r"\d+" if claim == "ends" else r"(?<=rank )\d+"
        text = re.sub(number, "", re.match(SAME[claim][1], text)[0])
        return sorted(re.findall(r"[^\s,;]+", text))

    alike = {name: [claim for claim in failed if claim in theirs and
                    same_part(claim, failed[claim]) ==
                    same_part(claim, theirs[claim])]
             for name, theirs in judged_mistakes(chapter).items()}
    claims = max(alike.values(), key=len, default=[])
    names = [name for name in alike if claims and alike[name] == claims]
    if names:
        say(f"{SAME[claims[0]][0]} of {' or '.join(names)}: see ./shardbook "
            f"mistake {title_of(chapter)} {names[0]}")
