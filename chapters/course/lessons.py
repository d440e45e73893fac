"""Lessons and toys: ./shardbook lesson, toy, exercise, mistake.

  lessons.py targets COMMAND WORDS...   prints what to build
  lessons.py run COMMAND WORDS...       runs it
"""

import os
import sys
import textwrap

import texts
from texts import (difference, exercise_of, has_toy, lesson_of, mistakes_of,
                   planted, read, write)

import programs
import pytorch
from chapter_names import find_chapters, title_of
from judge import hint, judge
from programs import BUILD, ROOT, die, say
from spelling import near


def run_lesson(chapter):
    say(f"chapters/{chapter}/lesson.cpp: the strategy is between its two marks")
    return programs.run([os.path.join(BUILD, f"chapters/lesson_{chapter}")])


def run_toy(chapter):
    say(f"chapters/{chapter}/toy.cpp: a small example, compared with one device")
    return programs.run([os.path.join(BUILD, f"chapters/toy_{chapter}")])


def exercise_path(chapter, suffix=".cpp"):
    return os.path.join(texts.OUT, "exercises", title_of(chapter) + suffix)


def twin_path(chapter):
    return exercise_path(chapter, ".py")


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
    if "--pytorch" in words:
        return pytorch.print_targets(command, words, twin_path)
    chapter, *more = read_words(command, words)
    # To show a text takes what Ninja runs, and to judge one the libraries
    judges = more if command == "mistake" else (
        not more and os.path.exists(exercise_path(chapter)))
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
