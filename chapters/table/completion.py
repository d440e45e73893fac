"""Prints what the last of some words may become: completion.bash and .zsh.

  completion.py WORD...   the words behind ./shardbook; the last may be empty

Commands and their options are those of help.txt, and a program is asked for its
own, if it has been built. Nothing is built, and what is not known is left out.
"""

import os
import re
import sys

import chapter_names
from chapter_names import OTHERS, PROGRAMS, find_programs, names
from programs import BUILD, ROOT
from report_runs import kept_names


def read(*path):
    try:
        with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def stems(folder, pattern):
    """What the pattern's group matches in the names of a folder's files."""
    names = sorted(os.listdir(os.path.join(ROOT, folder)))
    return [match[1] for name in names if (match := re.fullmatch(pattern, name))]


# ---- ./shardbook itself.

def commands():
    return re.findall(r"^  ([a-z]+)\b", read("chapters/table/help.txt"), re.M)


def own_options(command):
    """Those in the command's lines, and those that help.txt explains for it."""
    text = read("chapters/table/help.txt")
    lines = re.findall(rf"^  {command or 'help'} .*", text, re.M)
    found = re.findall(r"(?<=[ \[])--[a-z-]*", " ".join(lines))
    # "  --name NAME        run: ..."; without a command before the colon, of all
    for option, owners in re.findall(
            r"^  (--[a-z-]+)\S*(?: [A-Z]+)? +(?:([a-z, -]+): )?", text, re.M):
        if not owners or command in re.findall(r"[a-z]+", owners):
            found.append(option)
    return found


# ---- Programs.

def program_of(command, words):
    """Below the build folder; None if no options of a program can follow."""
    if command == "plan":
        return "chapters/planner/shardbook_plan"
    if command == "compare":
        words = []  # the options of all chapters, and of one device
    elif command != "run":
        return None
    if words[:1] == ["accelerate"]:
        return "chapters/accelerate"
    return chapter_names.program_of(find_programs(words[:1] or ["0"])[0])


def program_options(program):
    """The options of a built program, and the values of those that list them."""
    path = os.path.join(BUILD, program or "")
    if not os.path.isfile(path):
        return {}
    import subprocess  # here because its import takes milliseconds
    # Some programs have only the second of these
    help_text = subprocess.run([path, "--help-all", "--help"], text=True,
                               stdout=subprocess.PIPE, check=False).stdout
    options = {}
    for entry in re.split(r"\n  (?=-)", help_text)[1:]:
        flags, _, text = re.sub(r"\n\n.*", "", entry, flags=re.S).partition(" ")
        listed = re.search(r"^NAME.*\(([^()]*)\)$", " ".join(text.split()))
        values = listed[1].split(", ") if listed else []
        options.update((flag.partition("{")[0], values)
                       for flag in flags.split(",") if flag.startswith("--"))
    return options


# ---- What follows the words.

def values_of(command, words):
    """The names that may follow the words of a command."""
    if command == "run":
        return [*names(), *PROGRAMS, *OTHERS]
    if command == "compare":
        return names()
    if command == "mistake" and words:
        text = read("chapters", find_programs(words[:1])[0], "mistakes.txt")
        return re.findall(r"^== ([^:]+):", text, re.M)
    if command == "exercise" and words[1:] and words[-1] == "--step":
        text = read("chapters", find_programs(words[:1])[0], "lesson.cpp")
        strategy = re.search(r"// --- the strategy(.*)// --- end", text, re.S)
        functions = re.findall("^inline ", strategy[1] if strategy else "", re.M)
        return [str(number + 1) for number in range(len(functions))]
    if command in ("lesson", "toy", "exercise", "mistake"):
        return [] if words else names()
    if command == "report":
        return kept_names()
    if command == "notebook" and "--execute" in words:
        return stems("notebooks", r"\d+_(.*)\.ipynb")
    if command == "bench":
        sys.path.append(os.path.join(ROOT, "bench"))
        from run_benchmarks import ALONE
        return [*stems("bench", r"(.*)_bench\.cpp"), *ALONE]
    if command == "test":
        rooms = read("build/meson-info/intro-tests.json")
        return ["gpu", *re.findall(r'"name": "([^"]+)"', rooms)]
    return ["bash", "zsh"] if command == "completion" else []


def following(before, last):
    """All that may stand behind some words, in the place of the last."""
    command = next((word for word in before if word in commands()), "")
    if not command:
        return own_options("") if last.startswith("-") else commands()
    words = before[before.index(command) + 1:]
    if "--" in words:
        words = words[:words.index("--")]
    elif command != "plan":
        return (own_options(command) if last.startswith("-") else
                values_of(command, words))
    options = program_options(program_of(command, words))
    option, has_value, _ = last.partition("=")
    if has_value:
        return [f"{option}={value}" for value in options.get(option, [])]
    return options.get(before[-1]) or list(options)


def offers(*before, last):
    # bash has "--backend=sim" as three words
    before = [word for word in before if word != "="]
    last = "" if last == "=" else last
    return [word for word in dict.fromkeys(following(before, last))
            if word.startswith(last)]


if __name__ == "__main__":
    print(*offers(*sys.argv[1:-1], last=sys.argv[-1]), sep="\n")
