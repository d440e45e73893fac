"""What scripts by hand share: where the book and its programs are."""

import argparse
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHAPTERS = {path.parent.name[:2]: path.parent.name
            for path in ROOT.glob("chapters/[0-9]*/main.cpp")}


def program(build, chapter):
    """The program of a chapter, "02_ddp", or beside those: "cifar_moe"."""
    own = f"{chapter}/ch{chapter}" if chapter[0].isdecimal() else chapter
    return str(build / "chapters" / own)


def parser(text):
    """For a script whose first text says what it does."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawTextHelpFormatter)


def folder(path):
    return pathlib.Path(path).resolve()
