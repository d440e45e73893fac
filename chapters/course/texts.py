"""The texts of lessons: exercises and mistakes are made of them.

  texts.py CHAPTER FILE      writes the lesson, its exercise and its mistakes as
                             one source, for the tests

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
import sys
import textwrap

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "table"))

from programs import BUILD, ROOT, die  # noqa: E402
from vocabulary import comment_on_calls  # noqa: E402

BEGIN, END = "// --- the strategy\n", "// --- end\n"
OUT = BUILD  # what is compiled is written below it
WORK = os.path.join(ROOT, "exercises")  # what readers write; it stays


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


def with_included(text):
    """A lesson, its header and the chapters' files that they include."""
    includes = re.findall(
        r'^#include "(chapters/(?:\d\d_|common/lesson).*)"', text, re.M)
    return text + "".join(with_included(read(each)) for each in includes)


def functions_of(lesson):
    """The names of the strategy's functions: the steps of its exercise."""
    strategy = lesson[lesson.index(BEGIN):lesson.index(END)]
    return re.findall(r"^inline [^(]*?(\w+)\(", strategy, re.M)


def notes_of(chapter):
    """What an exercise says beforehand: the first section of its hints.txt."""
    found = re.match(r"== the exercise\n(.*?)\n(?=== |\n== )",
                     read("chapters", chapter, "hints.txt"), re.S)
    return found[1] if found else ""


def judged_of(lesson):
    judged = ["weights and loss", "bytes"]
    judged += ["the largest peak of a rank"] * ("/*peak_bytes=*/" in lesson)
    judged += ["the longest chain of messages"] * (
        "/*chain=*/" in lesson)
    return f"Judged: {', '.join(judged)}, and other sizes. "


def comment(text):
    return textwrap.fill(text, 80, initial_indent="// ",
                         subsequent_indent="// ") + "\n"


def exercise_of(chapter):
    """The lesson whose strategy keeps types, signatures and comments alone; above
    it, what is judged, notes, and the calls that are needed."""
    lesson = lesson_of(chapter)
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
    calls = comment_on_calls(strategy, read("chapters", "from_pytorch.md"),
                             with_included(before))
    notes = comment(judged_of(lesson) + notes_of(chapter))
    return before + notes + calls + BEGIN + "".join(lines) + END + after


def with_end_of_lesson(chapter, path):
    """The file up to its second mark, and what the lesson has behind it: so no
    file says itself how it is judged. "" if it has no such mark."""
    text, mark, _ = read(path).partition(END)
    begin, _, end = lesson_of(chapter).partition(END)
    line = begin.count("\n") + 2
    return mark and (f'#line 1 "{path}"\n{text}{END}'
                     f'#line {line} "{ROOT}/chapters/{chapter}/lesson.cpp"\n'
                     + end)


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
        ("exercise", exercise_of(chapter)), *planted_in(chapter)])
    claims = {"": "", "exercise": "ends",
              **{each.name: each.claims
                 for each in mistakes_of(chapter).values()}}
    source = '#include "tests/lessons/variants.h"\n' + source
    for number, (name, call) in enumerate(zip(claims, calls)):
        source += (f"static shardbook::lessons_test::Variant add_{number}("
                   f'"{chapter}", "{name}", "{claims[name]}", '
                   f"[] {{ return {call}; }});\n")
    write(os.path.abspath(path), source)


if __name__ == "__main__":
    variants(*sys.argv[1:])
