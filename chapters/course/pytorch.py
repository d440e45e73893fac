"""The lessons in PyTorch, chapters/NN_name/lesson.py, and exercises made of them.
No line here imports torch: the Python that runs the book may lack it."""

import ast
import os
import sys

import texts
from texts import difference, read, write  # first: finds table/

import programs
from chapter_names import find_chapters, title_of
from programs import BUILD, ROOT, die, say

# It has the model, the format of weights, and the search for a Python with torch
TESTS = os.path.join(ROOT, "tests", "pytorch")

BEGIN, END = "# --- the strategy\n", "# --- end\n"
YARDSTICK = "chapters/00_single_device/ch00_single_device"
# A torch is imported in two seconds; a rank that misses a message waits for ten
RUN_SECONDS = 60


def lesson_path(chapter):
    return os.path.join(ROOT, "chapters", chapter, "lesson.py")


def functions_of(node, outer=""):
    """The functions and methods of a module, with their names."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            yield outer + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from functions_of(child, child.name + ".")


def exercise_of(lesson):
    """The lesson whose strategy keeps signatures, docstrings and comments alone."""
    before, rest = lesson.split(BEGIN)
    strategy, after = rest.split(END)
    lines = strategy.splitlines(keepends=True)
    for name, function in reversed([*functions_of(ast.parse(strategy))]):
        first, end = function.body[0], function.end_lineno
        begin = function.lineno
        while not lines[begin - 1].rstrip().endswith(":"):
            begin += 1
        if ast.get_docstring(function) is not None:
            begin = first.end_lineno
        indent = " " * first.col_offset
        comments = [indent + line.lstrip() for line in lines[begin:end]
                    if line.lstrip().startswith("#")]
        lines[begin:end] = [*comments, f'{indent}lesson.write_this("{name}")\n']
    return before + BEGIN + "".join(lines) + END + after


def python_with_torch():
    sys.path.append(TESTS)
    import torch_python  # here because other commands need no tests/
    return torch_python.find() or die(torch_python.none_found())


def judge(path):
    """Runs a lesson; its exit status is 0 if all claims hold."""
    paths = [texts.HERE, TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]
    status = programs.run(
        ["timeout", "--kill-after=1", str(RUN_SECONDS), python_with_torch(),
         "-B", path],
        environment={"PYTHONPATH": os.pathsep.join(paths),
                     "SHARDBOOK_YARDSTICK": os.path.join(BUILD, YARDSTICK),
                     "OMP_NUM_THREADS": "1"})
    if status in (124, 137):
        say(f"stopped after {RUN_SECONDS} s: a loop that never ends")
    return status and 1


def run_lesson(chapter):
    say(f"chapters/{chapter}/lesson.py: the strategy is between its two marks")
    return judge(lesson_path(chapter))


def run_exercise(chapter, path, wish=None):
    name = path.replace(ROOT + os.sep, "")
    command = f"./shardbook exercise {title_of(chapter)} --pytorch"
    lesson = read(lesson_path(chapter))
    is_new = not os.path.exists(path)
    text = exercise_of(lesson) if is_new else read(path)
    if wish == "--solution":
        print(difference(text, lesson, (name, "the lesson"))
              or f"{name} is the lesson.")
        return 0
    if is_new:
        write(path, text)
        print(f"{name}: write what is missing between the two marks, then\n"
              f"  {command}{' ' * 11}  runs and judges it\n"
              f"  {command} --solution  shows what the lesson writes")
        return 0
    status = judge(path)
    if status == 0:
        print("All claims hold: this is the strategy.")
    return status


# ---- The commands with --pytorch; lessons.py passes them on.

def read_words(command, words):
    """The chapter, and the word behind it."""
    if command not in ("lesson", "exercise"):
        die(f"{command} --pytorch: --pytorch goes with lesson and exercise only")
    words = [word for word in words if word != "--pytorch"]
    if not words or words[1:] not in (
            [[]] if command == "lesson" else [[], ["--solution"]]):
        die(f"{command} {' '.join([*words, '--pytorch'])}: give a chapter, as in "
            f"./shardbook {command} ddp --pytorch"
            + (" [--solution]" if command == "exercise" else ""))
    chapter, = find_chapters(words[:1])
    if not os.path.isfile(lesson_path(chapter)):
        die(f"{command} {words[0]} --pytorch: this lesson is in C++ alone; in "
            "PyTorch there are " + ", ".join(
                title_of(each) for each in find_chapters([])
                if os.path.isfile(lesson_path(each))))
    return [chapter, *words[1:]]


def print_targets(command, words, exercise_path):
    chapter, *more = read_words(command, words)
    judges = command == "lesson" or (
        not more and os.path.exists(exercise_path(chapter)))
    if judges:
        python_with_torch()
    print(YARDSTICK if judges else "build.ninja")


def run(command, words, exercise_path):
    chapter, *more = read_words(command, words)
    if command == "lesson":
        return run_lesson(chapter)
    return run_exercise(chapter, exercise_path(chapter), *more)
