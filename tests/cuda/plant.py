#!/usr/bin/env python3
"""Copies a kernel with one mistake in it.

    plant.py SOURCE OUTPUT NTH OLD NEW

replaces the NTH OLD (from 1) by NEW. It fails where there are not so many, so
that a kernel that was rewritten gets its mistake anew.
"""
import sys


def main():
    source, output, nth, old, new = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        parts = file.read().split(old)
    nth = int(nth)
    if len(parts) <= nth:
        sys.exit(f"plant.py: {source} holds {old!r} only {len(parts) - 1} "
                 "times; plant another mistake")
    with open(output, "w", encoding="utf-8") as file:
        file.write(old.join(parts[:nth]) + new + old.join(parts[nth:]))


main()
