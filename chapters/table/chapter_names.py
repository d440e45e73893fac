"""The chapters, and the words that name them and their programs.

  chapter_names.py   lists them: ./shardbook run --list
"""

import os

from programs import ROOT, die
from spelling import near

# By title: what the chapter splits, and its other names.
_CHAPTERS = {
    "single_device": ("nothing: the yardstick", "one one_device single"),
    "data_parallel": ("the batch, over devices of one process", "dp"),
    "ddp": ("the batch, over ranks", "distributed_data_parallel"),
    "zero_fsdp": ("the batch, and state", "zero zero1 zero2 zero3 fsdp"),
    "model_parallel": ("the layers, over two devices", "mp naive splits"),
    "gpipe": ("the layers, and the batch into micro-batches", ""),
    "1f1b": ("the layers", "pipeline pipedream zero_bubble dualpipe"),
    "tensor_parallel": ("every matrix, by columns and rows", ""),
    "tensor_parallel_2d": ("every matrix, over a square of ranks", ""),
    "tensor_parallel_2p5d": ("the same, over several squares", ""),
    "tensor_parallel_3d": ("every matrix, over a cube of ranks", ""),
    "dtensor": ("whatever a layout says", ""),
    "sequence_parallel": ("the tokens of every sample", ""),
    "moe": ("the experts of a layer", ""),
    "hybrid_3d": ("batch, layers, matrices, tokens, experts at once", ""),
    "engine": ("whatever a JSON file with DeepSpeed's keys says", ""),
}
_ALIASES = {alias: title for title, (_, aliases) in _CHAPTERS.items()
            for alias in aliases.split()}

# Programs beside those of the chapters, build/chapters/NAME. The others print,
# and keep no run.
PROGRAMS = {"cifar_moe": "experts: DeepSpeed's example on CIFAR-10"}
OTHERS = {"accelerate": "whatever a plugin says: Accelerate's loop"}


def program_of(name):
    """The program of a chapter, or one of PROGRAMS, in the build folder."""
    own = name if name in PROGRAMS else os.path.join(name, "ch" + name)
    return os.path.join("chapters", own)


def title_of(name):
    """The name that a reader types."""
    is_chapter = name[:1].isdecimal()
    return name.partition("_")[2] if is_chapter else name


def all_chapters():
    """The folders with a program, in reading order."""
    folder = os.path.join(ROOT, "chapters")
    return [name for name in sorted(os.listdir(folder))
            if name[:2].isdecimal() and name[2:3] == "_"
            and os.path.isfile(os.path.join(folder, name, "main.cpp"))]


def names():
    """The titles of the chapters, and their other names."""
    titles = [title_of(chapter) for chapter in all_chapters()]
    return titles + [alias for alias, title in _ALIASES.items()
                     if title in titles]


def find_chapters(words):
    """The chapters that the words name; without words, all."""
    chapters = all_chapters()
    if not chapters:
        die("run: there is no chapter yet")
    return [_find(word, chapters) for word in words] or chapters


def find_programs(words):
    """The same for words that may name one of PROGRAMS."""
    chapters = find_chapters([])
    return [word if word in PROGRAMS else
            _find(word, chapters, [*PROGRAMS, *OTHERS])
            for word in words] or chapters


def _find(word, chapters, programs=()):
    """The chapter that a word such as 2, 02, ddp or chapters/02_ddp/ names."""
    name = word.removesuffix("/").rpartition("/")[2].replace("-", "_")
    name = _ALIASES.get(name, name)
    if len(name) == 1 and name.isdecimal():
        name = "0" + name
    for chapter in chapters:
        number, _, title = chapter.partition("_")
        if name in (chapter, number, title):
            return chapter
    return die(f"{word}: no such chapter{near(name, [*names(), *programs])}; "
               "./shardbook run --list lists them")


def print_list():
    for chapter in all_chapters():
        number, _, title = chapter.partition("_")
        splits, aliases = _CHAPTERS.get(title, ("", ""))
        also = f" ({', '.join(aliases.split())})" if aliases else ""
        print(f"{number} {title:21} {splits}{also}")
    for name, text in {**PROGRAMS, **OTHERS}.items():
        print(f"   {name:21} {text}")


if __name__ == "__main__":
    print_list()
