"""Lessons and toys: ./shardbook lesson, toy, exercise, mistake.

  lessons.py targets COMMAND WORDS...   prints what to build
  lessons.py run COMMAND WORDS...       runs it
"""

import json
import os
import sys
import textwrap
import time

import texts
from texts import (END, difference, exercise_of, functions_of, has_toy,
                   lesson_of, mistakes_of, planted, read, write)

import grade
import programs
import pytorch
from chapter_names import find_chapters, title_of
from hints import next_hint
from judge import hint, judge
from programs import BUILD, ROOT, die, say
from spelling import near
from steps import function_text, judge_steps, show, steps_of


def run_lesson(chapter):
    say(f"chapters/{chapter}/lesson.cpp: the strategy is between its two marks")
    return programs.run([os.path.join(BUILD, f"chapters/lesson_{chapter}")])


def run_toy(chapter):
    say(f"chapters/{chapter}/toy.cpp: a small example, compared with one device")
    return programs.run([os.path.join(BUILD, f"chapters/toy_{chapter}")])


def exercise_path(chapter, suffix=".cpp"):
    return os.path.join(texts.WORK, title_of(chapter) + suffix)


def twin_path(chapter):
    return exercise_path(chapter, ".py")


def run_exercise(chapter, wishes):
    file = wishes.get("--file")
    path = os.path.abspath(file) if file else exercise_path(chapter)
    name = path.replace(ROOT + os.sep, "")
    if "--format" in wishes:
        said = grade.as_object(chapter, path, more_tries=not file)
        print(json.dumps(said, ensure_ascii=False, indent=2))
        return int(said["points"] < said["of"])
    # A file that nobody has touched is begun again, and is no try
    is_new = not file and (not os.path.exists(path) or
                           read(path) == exercise_of(chapter))
    if "--solution" in wishes:
        show_solution(chapter, name, exercise_of(chapter) if is_new
                      else read(path), wishes.get("--step"))
        return 0
    if is_new:
        write(path, exercise_of(chapter))
        command = f"./shardbook exercise {title_of(chapter)}"
        print(f"{name}: write what is missing between the two marks, then\n"
              f"  {command:46}  compiles and judges it\n"
              f"  {command + ' --hint':46}  helps with the next step\n"
              f"  {command + ' --solution':46}  shows what the lesson writes",
              flush=True)
    if "--watch" in wishes:
        return watch(path, name, lambda: answer(chapter, path, name, wishes))
    if is_new and "--hint" not in wishes:
        return 0
    return answer(chapter, path, name, wishes)


def show_solution(chapter, name, text, step):
    """What the lesson writes in the place of the reader's text."""
    lesson = lesson_of(chapter)
    if step:
        function = functions_of(lesson)[step - 1]
        text, lesson = (function_text(each, function)
                        for each in (text, lesson))
        name = f"{name}, {function}"
    print(difference(text, lesson, (name, "the lesson"))
          or f"{name} is the lesson's.")


def answer(chapter, path, name, wishes):
    """Judges the reader's file, or one of its steps: 0 if all claims hold."""
    number, steps = wishes.get("--step"), steps_of(chapter, read(path))
    if number or "--hint" in wishes:
        if steps:
            return answer_by_steps(chapter, path, steps, number,
                                   "--hint" in wishes)
        say(f"{name}: its steps cannot be told apart, for want of a mark or a "
            "brace; all of it is judged")
    written = [step for step in steps if step.why != "empty"]
    failed, judged = {}, {}
    if path == exercise_path(chapter):
        grade.tries_of(path, more=1)
    if read(path).partition(END)[2] != lesson_of(chapter).partition(END)[2]:
        say(f"behind the line {END.strip()} the judge has the lesson's own text")
    if len(written) in (0, len(steps)):
        failed, compiles = judge(chapter, path, "exercise")
        if failed == {}:
            print("All claims hold: this is the strategy.")
            return 0
        if not compiles:
            return 1
        if "ends" in (failed or {}) and written:
            say(f"{name} threw: the claims are judged when all ranks end")
    if len(steps) > 1:
        judged = judge_steps(chapter, path,
                             [step for step in steps if not step.why])
        first = show(steps, judged)
        if first is None:
            say("each step holds among the lesson's others: what is outside of "
                "the two marks differs, or two steps do not fit together")
        failed = judged.get(first, (failed,))[0]
    say_hint(chapter, failed)
    return 1


def say_hint(chapter, failed):
    sentence = hint(chapter, failed)
    if sentence:
        say(sentence)


def answer_by_steps(chapter, path, steps, number, wants_hint):
    """Judges one step, or shows the next hint of the first that fails."""
    before = [step for step in steps if step.number == number] if number else (
        steps[:next((k + 1 for k, step in enumerate(steps) if step.why),
                    len(steps))])
    judged = judge_steps(chapter, path,
                         [step for step in before if not step.why])
    first = show(before, judged, len(steps))
    if first is None:
        print("All steps hold: no hint is needed." if wants_hint else
              f"Step {number} holds.")
        return 0
    if wants_hint:
        print(next_hint(chapter, first))
    else:
        say_hint(chapter, (judged.get(first) or [None])[0])
    return 1


def watch(path, name, judge_it):
    """Judges a file at once and at every save, until all claims hold."""
    judged = None
    while True:
        saved = stamp(path)
        if saved in (None, judged):  # an editor may replace it just now
            programs.pause(0.1)
            continue
        print(f"--- {time.strftime('%H:%M:%S')}  {name}, judged at every save; "
              "Ctrl-C ends", flush=True)
        try:
            status = judge_it()
        except FileNotFoundError:
            continue
        if status == 0 and stamp(path) == saved:
            return 0
        judged = saved


def stamp(path):
    """Another one after every save; None while there is no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


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
    failed, _ = judge(chapter, path, "mistake")
    return 0 if failed and " ".join(failed) == mistake.claims else 1


COMMANDS = {"lesson": run_lesson, "toy": run_toy, "exercise": run_exercise,
            "mistake": run_mistake}


def read_words(command, words):
    """The chapter, and the word behind it."""
    words = sorted(words, key=lambda word: word.startswith("--"))
    most = {"lesson": 1, "toy": 1, "mistake": 2}.get(command, len(words))
    if not 1 <= len(words) <= most:
        usage = {"exercise": " [--watch]", "mistake": " [NAME]"}
        die(f"{command}: give a chapter, as in ./shardbook {command} "
            f"ddp{usage.get(command, '')}")
    chapter, *more = *find_chapters(words[:1]), *words[1:]
    if command == "toy" and not has_toy(chapter):
        die(f"toy {words[0]}: its documents have no example; there are "
            + ", ".join(map(title_of, filter(has_toy, find_chapters([])))))
    if command == "exercise":
        return [chapter, read_wishes(chapter, " ".join(words[:1]), more)]
    if command == "mistake" and more and more[0] not in mistakes_of(chapter):
        mistakes = list(mistakes_of(chapter))
        die(f"mistake {words[0]} {more[0]}: no such mistake"
            f"{near(more[0], mistakes)}; there are {', '.join(mistakes)}")
    return [chapter, *more]


def read_wishes(chapter, title, words):
    """The options of an exercise, with their values."""
    wishes = {}
    for word in words:
        option, _, value = word.partition("=")
        if option in wishes or option not in (
                "--step", "--hint", "--watch", "--solution", "--file", "--format"):
            die(f"exercise {title} {word}: only --step N, --hint, --watch, "
                "--solution, or --file FILE and --format json, may follow")
        wishes[option] = value
    given = {*wishes} - {"--step", "--file"}
    if len(given) > 1 or any({*pair} <= {*wishes} for pair in (
            ("--step", "--format"), ("--solution", "--file"))):
        die(f"exercise {title} {' '.join(wishes)}: give one of them")
    if "--step" in wishes:
        names = functions_of(lesson_of(chapter))
        numbers = [str(number) for number in range(1, len(names) + 1)]
        if wishes["--step"] not in numbers:
            die(f"exercise {title} --step {wishes['--step']}: give a step: "
                + ", ".join(map(" ".join, zip(numbers, names))))
        wishes["--step"] = int(wishes["--step"])
    grade.check_format(f"exercise {title}", words)
    if "--file" in wishes:
        problem = grade.problem_of(wishes["--file"])
        if problem:
            die(f"exercise {title} --file {wishes['--file']}: {problem}")
    elif "--format" in wishes and not os.path.exists(exercise_path(chapter)):
        die(f"exercise {title} --format json: there is no answer yet; ./shardbook "
            f"exercise {title} begins one, and --file FILE gives another")
    return wishes


def print_targets(command, *words):
    if "--pytorch" in words:
        return pytorch.print_targets(command, words, twin_path)
    chapter, *more = read_words(command, words)
    # To show a text takes what Ninja runs, and to judge one the libraries
    judges = more if command == "mistake" else (
        command == "exercise" and "--solution" not in more[0] and
        ({"--watch", "--file"} & {*more[0]} or
         os.path.exists(exercise_path(chapter))))
    if command in ("lesson", "toy"):
        print(f"chapters/{command}_{chapter}")
    else:
        print(f"lesson_libs_{chapter}" if judges else "build.ninja")


def run(command, *words):
    if "--pytorch" in words:
        return pytorch.run(command, words, twin_path)
    return COMMANDS[command](*read_words(command, words))


if __name__ == "__main__":
    programs.main(print_targets, run)
