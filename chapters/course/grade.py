"""To hand in and to grade: ./shardbook grade FOLDER [--csv FILE] [--format json].

  grade.py targets FOLDER ...   prints what to build
  grade.py run FOLDER ...       judges FOLDER/STUDENT/CHAPTER.cpp of a class

Each file is judged by a program of its own, ./shardbook exercise CHAPTER --file
FILE --format json, as many at once as there are cores.
"""

import collections
import csv
import json
import os
import sys
import tempfile

import limits
from texts import lesson_of, read, write  # first: finds table/

import programs
from chapter_names import find_chapters, names, title_of
from judge import failed_of, hint, judged
from programs import ROOT, die, say
from spelling import near

MOST_BYTES = 1 << 20
COLUMNS = ["student", "exercise", "points", "of", "holds", "tries", "hint",
           "error"]


def value_of(option, words):
    """That of --option=VALUE among the words, or None."""
    return dict(word.split("=", 1) for word in words if "=" in word).get(option)


def check_format(command, words):
    form = value_of("--format", words)
    if form not in (None, "json"):
        die(f"{command} --format {form}: only json")


def problem_of(path):
    """Why a file cannot be judged, or ""."""
    try:
        if not os.path.isfile(path):
            return "is no file" if os.path.exists(path) else "no such file"
        if os.path.getsize(path) > MOST_BYTES:
            return f"has more than {MOST_BYTES >> 20} MiB"
        with open(path, encoding="utf-8") as file:
            return "has a zero byte" if "\0" in file.read() else ""
    except UnicodeDecodeError:
        return "is no text in UTF-8"
    except OSError as error:
        return error.strerror


# ---- One file.

def tries_of(path, more=0):
    """How often the judge has seen a reader's file, which is counted beside it;
    None where nothing is counted."""
    count = path.removesuffix(".cpp") + ".tries"
    text = read(count).strip() if os.path.isfile(count) else ""
    known = int(text) if text.isdecimal() else None
    if more:
        known = (known or 0) + more
        write(count, f"{known}\n")
    return known


def most_points(chapter):
    """A point each for numbers, bytes, sizes and, where they are judged, memory
    and waits."""
    lesson = lesson_of(chapter).split("this_lesson()")[1]
    return 3 + ("peak_bytes" in lesson) + ("/*chain=*/" in lesson)


def as_object(chapter, path, more_tries=0):
    """What the judge says of a file. That all ranks end brings no point."""
    tries = tries_of(path, more_tries)
    claims, _, error, _ = judged(chapter, path, "exercise")
    return {"chapter": title_of(chapter), "file": path,
            "claims": [{"name": name, "holds": state == "holds", "text": text}
                       for name, state, text in claims],
            "points": sum(state == "holds" for _, state, _ in claims),
            "of": most_points(chapter), "tries": tries,
            "hint": hint(chapter, failed_of(claims)) or None,
            "error": error or None, "not_limited": limits.missing()}


# ---- A class.

# What a student handed in; without a chapter, a sentence says why
HandedIn = collections.namedtuple("HandedIn", "student name chapter path problem")


def handed_in(folder):
    """The files of a class, by student."""
    found = []
    for student in sorted(os.listdir(folder)):
        own = os.path.join(folder, student)
        if student.startswith(".") or not os.path.isdir(own):
            continue
        own_names = [] if not os.access(own, os.R_OK | os.X_OK) else sorted(
            name for name in os.listdir(own)
            if not name.startswith(".") and not name.endswith(".tries"))
        chapters = set()
        for name in own_names:
            each = file_of(student, name, os.path.join(own, name))
            if each.chapter and each.chapter in chapters:
                each = each._replace(chapter=None, problem="is a second answer "
                                     "to " + title_of(each.chapter))
            chapters.add(each.chapter)
            found.append(each)
        if not own_names:
            found.append(HandedIn(student, "", None, own, "no file to be read"))
    return found


def file_of(student, name, path):
    title, suffix = os.path.splitext(name)
    chapter, problem = None, problem_of(path)
    if suffix != ".cpp" or title not in names():
        problem = f"names no exercise{near(title, names())}"
    elif not problem:
        chapter = find_chapters([title])[0]
    return HandedIn(student, name, chapter, path, problem)


def judge_all(files):
    """Judges files side by side; returns the judge's objects."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                           "lessons.py")
    with tempfile.TemporaryDirectory() as folder:
        answers = [os.path.join(folder, str(k)) for k in range(len(files))]
        programs.run_side_by_side(
            [["sh", "-c", 'exec "$@" >"$0"', answer, sys.executable, "-S", "-B",
              program, "run", "exercise", each.chapter, "--file=" + each.path,
              "--format=json"] for each, answer in zip(files, answers)],
            len(os.sched_getaffinity(0)),
            on_start=lambda k: say(f"[{k + 1}/{len(files)}] {files[k].student} "
                                   f"{files[k].name}"))
        return [json.loads(read(answer) or "null") for answer in answers]


def row_of(each, answer):
    """One row of the CSV file and of the objects."""
    if each.chapter is None:
        return dict(zip(COLUMNS, [each.student, each.name, None, None, "", None,
                                  None, each.problem]))
    if answer is None:
        answer = {"points": None, "of": None, "claims": [], "tries": None,
                  "hint": None, "error": "the judge failed: see above"}
    claims = answer["claims"]
    failed = [claim for claim in claims if not claim["holds"]]
    return {"student": each.student, "exercise": title_of(each.chapter),
            "points": answer["points"], "of": answer["of"],
            "holds": " ".join(claim["name"] for claim in claims
                              if claim["holds"]),
            "tries": answer["tries"], "hint": answer["hint"],
            "error": answer["error"] or (
                f"{failed[0]['name']}: {failed[0]['text']}" if failed else None)}


def print_table(rows):
    """A row per student, a column per chapter; sentences below."""
    cells, numbers = collections.defaultdict(dict), set()
    for row in rows:
        points = cells[row["student"]]
        if row["of"]:
            number = find_chapters([row["exercise"]])[0][:2]
            numbers.add(number)
            points[number] = row
    width = max(map(len, ["student", *cells]))
    columns = sorted(numbers)
    print("  ".join([f"{'student':{width}}", *(f"{n:3}" for n in columns),
                     "points"]))
    for student, points in cells.items():
        shares = [f"{points[n]['points']}/{points[n]['of']}" if n in points
                  else "-" for n in columns]
        total = sum(row["points"] for row in points.values())
        print(shown("  ".join([f"{student:{width}}",
                               *(f"{share:3}" for share in shares),
                               str(total)])))
    for row in rows:
        if row["error"]:
            name = ", ".join(filter(None, [row["student"], row["exercise"]]))
            print(shown(f"{name}: " + row["error"].partition("\n")[0]))


def shown(text):
    """Without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def write_csv(path, rows):
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for row in rows:
            # A spreadsheet would compute a text that begins like a formula
            table.writerow(["'" + value if isinstance(value, str) and
                            value.startswith(("=", "+", "-", "@", "\t"))
                            else value for value in row.values()])


# ---- The command.

def read_words(words):
    """The folder, its files, and the options."""
    folders = [word for word in words if not word.startswith("--")]
    options = [word for word in words if word.startswith("--")]
    if len(folders) != 1:
        die("grade: give one folder, with FOLDER/STUDENT/CHAPTER.cpp, as in "
            "./shardbook grade class/")
    for option in options:
        if option.partition("=")[0] not in ("--csv", "--format"):
            die(f"grade {option}: only --csv FILE and --format json may follow")
    check_format("grade", options)
    folder = folders[0]
    if not os.path.isdir(folder):
        die(f"grade {folder}: no such folder")
    files = handed_in(folder)
    if not files:
        die(f"grade {folder}: no folder of a student is in it; give "
            "FOLDER/STUDENT/CHAPTER.cpp")
    return files, value_of("--csv", options), value_of("--format", options)


def print_targets(*words):
    files, _, _ = read_words(words)
    chapters = {each.chapter for each in files if each.chapter}
    print(*(f"lesson_libs_{each}" for each in sorted(chapters)) or ["build.ninja"])


def run(*words):
    files, csv_file, form = read_words(words)
    for what in limits.missing()[:1]:
        say("this kernel cannot forbid programs to start processes, to open "
            "connections, or to change files: run this where all may be lost")
    judging = [each for each in files if each.chapter]
    answers = dict(zip(judging, judge_all(judging)))
    rows = [row_of(each, answers.get(each)) for each in files]
    if csv_file:
        write_csv(csv_file, rows)
    if form:
        print(json.dumps(rows, ensure_ascii=False, indent=2))
    else:
        print_table(rows)
    return int(any(row["points"] is None for row in rows))


if __name__ == "__main__":
    programs.main(print_targets, run)
