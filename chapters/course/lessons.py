"""Lessons and toys: ./shardbook lesson, toy, exercise, mistake.

  lessons.py targets COMMAND WORDS...   prints what to build
  lessons.py run COMMAND WORDS...       runs it
"""

import json
import os
import sys
import textwrap

import texts
from texts import (END, difference, exercise_of, has_toy, lesson_of,
                   mistakes_of, planted, read, write)

import grade
import programs
from chapter_names import find_chapters, title_of
from grade import value_of
from judge import hint, judge
from programs import BUILD, ROOT, die, say
from spelling import near


def run_lesson(chapter):
    say(f"chapters/{chapter}/lesson.cpp: the strategy is between its two marks")
    return programs.run([os.path.join(BUILD, f"chapters/lesson_{chapter}")])


def run_toy(chapter):
    say(f"chapters/{chapter}/toy.cpp: a small example, compared with one device")
    return programs.run([os.path.join(BUILD, f"chapters/toy_{chapter}")])


def exercise_path(chapter):
    return os.path.join(texts.OUT, "exercises", title_of(chapter) + ".cpp")


def run_exercise(chapter, *wishes):
    file = value_of("--file", wishes)
    path = os.path.abspath(file) if file else exercise_path(chapter)
    if value_of("--format", wishes):
        answer = grade.as_object(chapter, path, more_tries=not file)
        print(json.dumps(answer, ensure_ascii=False, indent=2))
        return int(answer["points"] < answer["of"])
    if file:
        return judge_exercise(chapter, path)
    return write_or_judge(chapter, path, "".join(wishes))


def write_or_judge(chapter, path, wish):
    title, lesson = title_of(chapter), lesson_of(chapter)
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
    grade.tries_of(path, more=1)
    return judge_exercise(chapter, path)


def judge_exercise(chapter, path):
    if read(path).partition(END)[2] != lesson_of(chapter).partition(END)[2]:
        say(f"behind the line {END.strip()} the judge has the lesson's own text")
    failed = judge(chapter, path, "exercise")
    if failed == {}:
        print("All claims hold: this is the strategy.")
        return 0
    if "ends" in (failed or {}):
        say(f"{path.replace(ROOT + os.sep, '')} threw: the claims are judged when "
            "all ranks end")
    name_of_mistake = hint(chapter, failed)
    if name_of_mistake:
        say(name_of_mistake)
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


def check_wishes(word, chapter, wishes):
    """What may follow an exercise: --solution, or a file and a format."""
    names = [wish.partition("=")[0] for wish in wishes]
    if wishes != ["--solution"] and (
            {*names} - {"--file", "--format"} or len({*names}) < len(names)):
        die(f"exercise {word} {' '.join(wishes)}: only --solution, or --file FILE "
            "and --format json, may follow")
    grade.check_format(f"exercise {word}", wishes)
    file = value_of("--file", wishes)
    if file is not None:
        problem = grade.problem_of(file)
        if problem:
            die(f"exercise {word} --file {file}: {problem}")
    elif names == ["--format"] and not os.path.exists(exercise_path(chapter)):
        die(f"exercise {word} --format json: there is no answer yet; ./shardbook "
            f"exercise {word} begins one, and --file FILE gives another")


def read_words(command, words):
    """The chapter, and the word behind it."""
    words = sorted(words, key=lambda word: word.startswith("--"))
    most = {"mistake": 2, "exercise": 3}.get(command, 1)
    if not 1 <= len(words) <= most:
        usage = {"exercise": " [--solution]", "mistake": " [NAME]"}
        die(f"{command}: give a chapter, as in ./shardbook {command} "
            f"ddp{usage.get(command, '')}")
    chapter, *more = *find_chapters(words[:1]), *words[1:]
    if command == "toy" and not has_toy(chapter):
        die(f"toy {words[0]}: its documents have no example; there are "
            + ", ".join(map(title_of, filter(has_toy, find_chapters([])))))
    if command == "exercise":
        check_wishes(words[0], chapter, more)
    if command == "mistake" and more and more[0] not in mistakes_of(chapter):
        mistakes = list(mistakes_of(chapter))
        die(f"mistake {words[0]} {more[0]}: no such mistake"
            f"{near(more[0], mistakes)}; there are {', '.join(mistakes)}")
    return [chapter, *more]


def print_targets(command, *words):
    chapter, *more = read_words(command, words)
    # To show a text takes what Ninja runs, and to judge one the libraries
    judges = more if command == "mistake" else (
        more != ["--solution"] and
        (more or os.path.exists(exercise_path(chapter))))
    if command in ("lesson", "toy"):
        print(f"chapters/{command}_{chapter}")
    else:
        print(f"lesson_libs_{chapter}" if judges else "build.ninja")


def run(command, *words):
    return COMMANDS[command](*read_words(command, words))


if __name__ == "__main__":
    programs.main(print_targets, run)
