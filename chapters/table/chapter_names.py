"""The chapters, and the words that name them and their programs."""

import os

from programs import ROOT, die

_ALIASES = {alias: name for name, aliases in {
    "single_device": "one one_device single",
    "data_parallel": "dp",
    "ddp": "distributed_data_parallel",
    "zero_fsdp": "zero zero1 zero2 zero3 fsdp",
    "model_parallel": "mp naive splits",
    "1f1b": "pipeline pipedream zero_bubble dualpipe",
}.items() for alias in aliases.split()}

# Programs beside those of the chapters: build/chapters/NAME.
PROGRAMS = ["cifar_moe"]


def program_of(name):
    """The program of a chapter, or one of PROGRAMS, in the build folder."""
    own = name if name in PROGRAMS else os.path.join(name, "ch" + name)
    return os.path.join("chapters", own)


def title_of(name):
    return name if name in PROGRAMS else name.partition("_")[2]


def all_chapters():
    """The folders with a program, in reading order."""
    folder = os.path.join(ROOT, "chapters")
    return [name for name in sorted(os.listdir(folder))
            if name[:2].isdecimal() and name[2:3] == "_"
            and os.path.isfile(os.path.join(folder, name, "main.cpp"))]


def find_chapters(words):
    """The chapters that the words name; without words, all."""
    chapters = all_chapters()
    if not chapters:
        die("run: there is no chapter yet")
    return [_find(word, chapters) for word in words] or chapters


def find_programs(words):
    """The same for words that may name one of PROGRAMS."""
    return [word if word in PROGRAMS else find_chapters([word])[0]
            for word in words] or find_chapters([])


def _find(word, chapters):
    """The chapter that a word such as 2, 02, ddp or chapters/02_ddp/ names."""
    name = word.removesuffix("/").rpartition("/")[2].replace("-", "_")
    name = _ALIASES.get(name, name)
    if len(name) == 1 and name.isdecimal():
        name = "0" + name
    for chapter in chapters:
        number, _, title = chapter.partition("_")
        if name in (chapter, number, title):
            return chapter
    return die(f"{word}: no such chapter; there are: {' '.join(chapters)}, "
               "also by number or by name (zero, fsdp, pipeline, ...)")
