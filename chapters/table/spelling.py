"""The words that a mistyped one may stand for.

  spelling.py WORD KNOWN...   prints " (did you mean KNOWN?)", or nothing
"""

import sys


def num_typos(a, b):
    """How many letters too many, missing, wrong or swapped with the next turn
    one word into the other."""
    fewest = [[i + j for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            fewest[i][j] = min(fewest[i - 1][j] + 1, fewest[i][j - 1] + 1,
                               fewest[i - 1][j - 1] + (a[i - 1] != b[j - 1]))
            if i > 1 and j > 1 and a[i - 2:i] == b[j - 1] + b[j - 2]:
                fewest[i][j] = min(fewest[i][j], fewest[i - 2][j - 2] + 1)
    return fewest[-1][-1]


def near(word, known):
    """" (did you mean ddp?)", or nothing where no known word is near.

    To be the beginning of a word counts as one typo.
    """
    typed = word.lstrip("-")
    typos = {}
    for name in known:
        begins = len(typed) > 2 and name.lstrip("-").startswith(typed)
        typos[name] = (0 if name == word else 1 if begins else
                       num_typos(typed, name.lstrip("-")))
    fewest = min(typos.values(), default=0)
    if not 0 < fewest <= max(1, len(typed) // 3):
        return ""
    found = [name for name in typos if typos[name] == fewest]
    return f" (did you mean {' or '.join(found)}?)"


if __name__ == "__main__":
    print(near(sys.argv[1], sys.argv[2:]), end="")
