"""Lessons and toys: ./shardbook lesson, toy, exercise, mistake.

  lessons.py targets COMMAND WORDS...   prints what to build
  lessons.py run COMMAND WORDS...       runs it
  lessons.py variants CHAPTER FILE      writes the lesson, its exercise and its
                                        mistakes as one source, for the tests

An exercise is the lesson without the lines between its two marks. A mistake, in
chapters/NN_name/mistakes.txt, is a change of a few lines of the lesson:

  == NAME: CLAIMS that it breaks
  The symptom, in a sentence or two.
  -    lines of the lesson, which occur once in it,
  +    and what replaces them. A blank line ends a change; more may follow.
"""

import collections
import difflib
import os
import re
import shlex
import subprocess
import sys
import textwrap

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                "table"))

import programs  # noqa: E402
from chapter_names import find_chapters, title_of  # noqa: E402
from programs import BUILD, ROOT, die, say  # noqa: E402
from spelling import near  # noqa: E402

BEGIN, END = "// --- the strategy\n", "// --- end\n"
OUT = BUILD  # exercises and mistakes are written below it
RUN_SECONDS, COMPILE_SECONDS = 5, 60
# What a lesson may use beside core, comm and chapters/common (meson.build)
ALSO_LINKED = {"13_moe": ", 03, 07 and 13", "14_hybrid_3d": " and 07",
               "15_engine": " and all chapters"}


# ---- Texts.

def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def write(path, text):
    """Writes a file, below OUT or by its full name."""
    path = os.path.join(OUT, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def lesson_of(chapter):
    return read("chapters", chapter, "lesson.cpp")


def has_toy(chapter):
    return os.path.isfile(os.path.join(ROOT, "chapters", chapter, "toy.cpp"))


def exercise_of(lesson):
    """The lesson whose strategy keeps types, signatures and comments alone."""
    before, rest = lesson.split(BEGIN)
    strategy, after = rest.split(END)
    lines, function, in_body = [], None, False
    for line in strategy.splitlines(keepends=True):
        if line.startswith("inline "):
            function = re.search(r"(\w+)\(", line)[1]
        if in_body and line.startswith("}"):
            lines.append(f'  lesson::write_this("{function}");\n')
            function, in_body = None, False
        if not in_body:
            lines.append(line)
        elif line.lstrip().startswith("//"):
            lines.append("  " + line.lstrip())
        in_body = in_body or (function is not None and line.endswith("{\n"))
    return before + BEGIN + "".join(lines) + END + after


Mistake = collections.namedtuple("Mistake", "name claims symptom changes")


def mistakes_of(chapter):
    """The chapter's mistakes by name; changes are pairs of old and new text."""
    mistakes, is_open = {}, False
    for line in read("chapters", chapter, "mistakes.txt").splitlines():
        if line.startswith("== "):
            name, claims = line[3:].split(": ")
            mistake = mistakes[name] = Mistake(name, claims, [], [])
        elif line[:1] in "+-" and line:
            if not is_open or (line[0] == "-" and mistake.changes[-1][1]):
                mistake.changes.append(["", ""])
            mistake.changes[-1]["-+".index(line[0])] += line[1:] + "\n"
        elif line:
            mistake.symptom.append(line)
        is_open = line[:1] in ("+", "-")
    return mistakes


def planted(lesson, mistake):
    for old, new in mistake.changes:
        if lesson.count(old) != 1:
            die(f"mistake {mistake.name}: not once in the lesson:\n{old}")
        lesson = lesson.replace(old, new)
    return lesson


def difference(old, new, names):
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), *names,
                                 n=1, lineterm="")
    return "\n".join(lines)


def in_one_source(chapter, names_and_texts):
    """The lesson and changed ones, in namespaces of their own: their source, and
    the call that returns each one's Lesson."""
    lesson = lesson_of(chapter)
    outer = re.search(r"^namespace (shardbook::\w+) \{", lesson, re.M)[1]
    parts, calls = [], []
    for name, text in [("", lesson), *names_and_texts]:
        space = outer + "::" + (name.replace("-", "_") or "itself")
        begin = text.index(f"namespace {outer} {{") if name else 0
        end = text.index(f"}}  // namespace {outer}")
        parts += [f'#line {text[:begin].count(chr(10)) + 1} '
                  f'"chapters/{chapter}/lesson.cpp: {name}"\n',
                  text[begin:end].replace(outer, space), "}\n"]
        calls.append(f"{space}::this_lesson()")
    return "".join(parts), calls


def planted_in(chapter):
    """All mistakes, as names and lessons that have them."""
    return [(each.name, planted(lesson_of(chapter), each))
            for each in mistakes_of(chapter).values()]


def variants(chapter, path):
    """The lesson, its exercise and its mistakes, as the tests read them."""
    source, calls = in_one_source(chapter, [
        ("exercise", exercise_of(lesson_of(chapter))), *planted_in(chapter)])
    claims = {"": "", "exercise": "ends",
              **{each.name: each.claims
                 for each in mistakes_of(chapter).values()}}
    source = '#include "tests/lessons/variants.h"\n' + source
    for number, (name, call) in enumerate(zip(claims, calls)):
        source += (f"static shardbook::lessons_test::Variant add_{number}("
                   f'"{chapter}", "{name}", "{claims[name]}", '
                   f"[] {{ return {call}; }});\n")
    write(os.path.abspath(path), source)


# ---- One file, compiled and run as its lesson is.

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
    path = os.path.join(OUT, "mistakes", title_of(chapter), "all.cpp")
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
        "sizes": ("on other sizes, your program does the same as that", r".*")}


def hint(chapter, failed):
    """Names the mistakes that fail most like the reader's program, if any do."""
    if not failed or "is empty: write it" in failed.get("ends", ""):
        return

    def same_part(claim, text):
        # Which rank is named first may depend on time
        text = re.sub(r"rank \d+", "rank", re.match(SAME[claim][1], text)[0])
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


# ---- The commands.

def run_lesson(chapter):
    say(f"chapters/{chapter}/lesson.cpp: the strategy is between its two marks")
    return programs.run([os.path.join(BUILD, f"chapters/lesson_{chapter}")])


def run_toy(chapter):
    say(f"chapters/{chapter}/toy.cpp: a small example, compared with one device")
    return programs.run([os.path.join(BUILD, f"chapters/toy_{chapter}")])


def exercise_path(chapter):
    return os.path.join(OUT, "exercises", title_of(chapter) + ".cpp")


def run_exercise(chapter, wish=None):
    title, lesson = title_of(chapter), lesson_of(chapter)
    path = exercise_path(chapter)
    name = path.replace(ROOT + os.sep, "")
    command = f"./shardbook exercise {title}"
    is_new = not os.path.exists(path)
    text = exercise_of(lesson) if is_new else read(path)
    if wish == "--solution":
        print(difference(text, lesson, (name, "the lesson"))
              or f"{name} is the lesson.")
        return 0
    if is_new:
        write(path, text)
        print(f"{name}: write what is missing between the two marks, then\n"
              f"  {command:40}  compiles and judges it\n"
              f"  {command + ' --solution':40}  shows what the lesson writes")
        return 0
    failed = judge(chapter, path, "exercise")
    if failed == {}:
        print("All claims hold: this is the strategy.")
        return 0
    if "ends" in (failed or {}):
        say(f"{name} threw: the claims are judged when all ranks end")
    hint(chapter, failed or {})
    return 1


def run_mistake(chapter, which=None):
    title, mistakes = title_of(chapter), mistakes_of(chapter)
    if which is None:
        for mistake in mistakes.values():
            print(f"{mistake.name} (breaks: {mistake.claims})")
            print(textwrap.fill(" ".join(mistake.symptom), 76,
                                initial_indent="  ", subsequent_indent="  "))
        print(f"./shardbook mistake {title} NAME plants one in a copy of the "
              "lesson, and runs it.")
        return 0
    lesson, mistake = lesson_of(chapter), mistakes[which]
    text = planted(lesson, mistake)
    path = write(f"mistakes/{title}/{which}.cpp", text)
    print(textwrap.fill(" ".join(mistake.symptom), 76))
    print(difference(lesson, text, ("the lesson", which)), flush=True)
    failed = judge(chapter, path, "mistake")
    return 0 if failed and " ".join(failed) == mistake.claims else 1


COMMANDS = {"lesson": run_lesson, "toy": run_toy, "exercise": run_exercise,
            "mistake": run_mistake}


def read_words(command, words):
    """The chapter, and the word behind it."""
    if not 1 <= len(words) <= (1 if command in ("lesson", "toy") else 2):
        usage = {"exercise": " [--solution]", "mistake": " [NAME]"}
        die(f"{command}: give a chapter, as in ./shardbook {command} "
            f"ddp{usage.get(command, '')}")
    chapter, *more = *find_chapters(words[:1]), *words[1:]
    if command == "toy" and not has_toy(chapter):
        die(f"toy {words[0]}: its documents have no example; there are "
            + ", ".join(map(title_of, filter(has_toy, find_chapters([])))))
    if command == "exercise" and more not in ([], ["--solution"]):
        die(f"exercise {words[0]} {more[0]}: only --solution may follow")
    if command == "mistake" and more and more[0] not in mistakes_of(chapter):
        mistakes = list(mistakes_of(chapter))
        die(f"mistake {words[0]} {more[0]}: no such mistake"
            f"{near(more[0], mistakes)}; there are {', '.join(mistakes)}")
    return [chapter, *more]


def print_targets(command, *words):
    chapter, *more = read_words(command, words)
    # To show a text takes what Ninja runs, and to judge one the libraries
    judges = more if command == "mistake" else (
        not more and os.path.exists(exercise_path(chapter)))
    if command in ("lesson", "toy"):
        print(f"chapters/{command}_{chapter}")
    else:
        print(f"lesson_libs_{chapter}" if judges else "build.ninja")


def run(command, *words):
    return COMMANDS[command](*read_words(command, words))


if __name__ == "__main__":
    if sys.argv[1] == "variants":
        variants(*sys.argv[2:])
    else:
        programs.main(print_targets, run)
