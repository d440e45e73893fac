"""The steps of an exercise: each function of the strategy as the reader has
written it, among those of the lesson."""

import collections
import os
import re

from texts import BEGIN, END, functions_of, lesson_of, read, write

from judge import compile_lesson, failed_of, program_of, run_judged
from programs import BUILD, ROOT

# What braces are counted without
TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\])*"'
                   r"|'(?:\\.|[^'\\])'|[(){};]", re.S)


def definition(text, name):
    """Where a function, its body and what follows it begin, or None."""
    for match in re.finditer(rf"^[A-Za-z][^;{{}}()#/]*?\b{name}\(", text, re.M):
        parentheses, braces, body = 1, 0, None
        for token in TOKEN.finditer(text, match.end()):
            parentheses += {"(": 1, ")": -1}.get(token[0], 0)
            if parentheses and not braces:
                continue
            if token[0] == ";" and not braces:
                break  # a declaration
            if token[0] == "{":
                body = token.start() if body is None else body
                braces += 1
            elif token[0] == "}":
                braces -= 1
                if braces == 0:
                    return match.start(), body, token.end()
    return None


def function_text(text, name):
    """A function and the comment above it; empty if there is none."""
    span = definition(text, name)
    if span is None:
        return ""
    comment = re.search(r"(?:^//(?! ---).*\n)*\Z", text[:span[0]], re.M)
    return comment[0] + text[span[0]:span[2]] + "\n"


def signature(header):
    """The types of a function, without the names of its parameters."""
    header = re.sub(r"//.*", "", header)
    header = re.sub(r"\b(inline|static)\b", "", header)
    result, parameters = header.split("(", 1)
    types, depth = [""], 0
    for letter in parameters.rpartition(")")[0]:
        depth += (letter in "<({") - (letter in ">)}")
        if letter == "," and depth == 0:
            types.append("")
        else:
            types[-1] += letter
    types = [re.sub(r"(?<=[\s&*>])\w+$", "", each.partition("=")[0].strip())
             for each in types]
    return [" ".join(re.findall(r"\w+|\S", each)) for each in [result, *types]]


# `why` says why it cannot be judged: "empty", or a sentence
Step = collections.namedtuple("Step", "number name why")


def steps_of(chapter, text):
    """The steps of a reader's text; none where it does not have the form of an
    exercise, which the compiler or the whole program then says."""
    lesson = lesson_of(chapter)
    names = functions_of(lesson)
    if any(mark not in text for mark in (space_of(lesson)[1], BEGIN, END)):
        return []
    spans = sorted(filter(None, (definition(text, name) for name in names)))
    if any(one[2] > other[0] for one, other in zip(spans, spans[1:])):
        return []
    return [Step(number, name, why_not(lesson, text, name))
            for number, name in enumerate(names, 1)]


def why_not(lesson, text, name):
    span, theirs = definition(text, name), definition(lesson, name)
    header = lesson[theirs[0]:theirs[1]].strip()
    if span is None:
        return f"is gone; the lesson has\n{header}"
    if f'lesson::write_this("{name}");' in text[span[1]:span[2]]:
        return "empty"
    if signature(text[span[0]:span[1]]) != signature(header):
        return f"has other types than the lesson, which calls\n{header}"
    return ""


def space_of(lesson):
    """The namespace of a lesson, and the line that opens it."""
    opening = re.search(r"^namespace (shardbook::\w+) \{\n", lesson, re.M)
    return opening[1], opening[0]


def line_of(text, at, path):
    """Tells the compiler where the text from `at` on is from."""
    return f'\n#line {text.count(chr(10), 0, at) + 1} "{path}"\n'


def with_one(chapter, text, step, path):
    """The lesson from its namespace on, with the reader's text up to the second
    mark, in which all functions but one are the lesson's."""
    lesson = lesson_of(chapter)
    lesson_path = os.path.join(ROOT, "chapters", chapter, "lesson.cpp")
    end = text.index(END)
    others = [name for name in functions_of(lesson) if name != step.name]
    spans = sorted((definition(text, name), name) for name in others
                   if definition(text, name))
    at = text.index(space_of(lesson)[1])
    parts = []
    for (begin, _, after), name in spans:
        first, _, last = definition(lesson, name)
        parts += [line_of(text, at, path), text[at:begin],
                  line_of(lesson, first, lesson_path), lesson[first:last]]
        at = after
    close = lesson.index(f"}}  // namespace {space_of(lesson)[0]}")
    parts += [line_of(text, at, path), text[at:end],
              line_of(lesson, lesson.index(END), lesson_path),
              lesson[lesson.index(END):close]]
    return "".join(parts)


def judge_steps(chapter, path, steps):
    """Per step: the claims that fail, or None, and why there is no verdict. All
    are compiled at once; if they cannot be, one by one."""
    if not steps:
        return {}
    text, (outer, opening) = read(path), space_of(lesson_of(chapter))
    source = line_of(text, 0, path) + text[:text.index(opening)]
    for step in steps:
        source += with_one(chapter, text, step, path).replace(
            outer, f"{outer}::step_{step.number}") + "}\n"
    cases = "".join(f"  if (argv[1][0] == '{step.number}') return compare("
                    f"{outer}::step_{step.number}::this_lesson());\n"
                    for step in steps)
    source += f"int main(int, char** argv) {{\n{cases}  return 2;\n}}\n"
    with program_of("steps", chapter) as program:
        file = write(os.path.join(BUILD, program + ".cpp"), source)
        why = compile_lesson(chapter, file, program)
        if not why:
            return {step: verdict_of(run_judged(program, str(step.number)))
                    for step in steps}
    if len(steps) == 1:
        return {steps[0]: (None, why)}
    return {step: judge_steps(chapter, path, [step])[step] for step in steps}


def verdict_of(judgement):
    error = judgement.error
    return None if error else failed_of(judgement.claims), error


def show(steps, judged, count=None):
    """A line for each step; returns the first that does not hold, or None."""
    count = count or len(steps)
    width = max(len(step.name) for step in steps)
    first = None
    for step in steps:
        failed, why = judged.get(step, (None, step.why))
        if failed:
            why = "\n".join(f"{claim}: {text}" for claim, text in failed.items())
        row = f"step {step.number} of {count}  {step.name:{width}}  "
        if failed == {}:
            print(row + "holds")
            continue
        first = first or step
        if why != "empty":
            row += "FAILS  "
            why = why.replace("\n", "\n" + (" " * len(row) if failed else "  "))
        print(row + why, flush=True)
    return first
