"""Which row runs, and how long the rest will take, on stderr.

A terminal has one line, which is written anew when a row begins or ends:

  [12/102] 04_model_parallel, Naive ... (2 min left)

Elsewhere each row has its own line, when it begins.
"""

import os
import time

from programs import say


class Progress:
    def __init__(self, shares):
        """`shares` are the rows' shares of the time, in any unit."""
        self.shares = shares
        self.ended = 0  # the share of the rows that have
        self.row = ""
        self.began = time.monotonic()
        self.is_terminal = os.isatty(2) and os.environ.get("TERM") != "dumb"

    def begin(self, k, row):
        self.row = f"[{k + 1}/{len(self.shares)}] {row}"
        if self.is_terminal:
            self._show()
        else:
            say(self.row)

    def end(self, k, row, words):
        """Row k has ended, with these words on its stderr."""
        self.ended += self.shares[k]
        self.clear()
        if words:
            say(f"{row}:\n{words}", end="")
        if self.is_terminal:
            self._show()

    def clear(self):
        if self.is_terminal:
            say("\r\033[K", end="")

    def _show(self):
        """The row gives way in a narrow terminal, and Ctrl-C prints "^C"."""
        room = (os.get_terminal_size(2).columns or 80) - len("^C") - 1
        left = f" ... {self._time_left()}".rstrip()
        line = (self.row[:max(room - len(left), 0)] + left)[:max(room, 0)]
        self.clear()
        say(line, end="")

    def _time_left(self):
        if not self.ended:
            return ""
        pace = (time.monotonic() - self.began) / self.ended
        seconds = pace * (sum(self.shares) - self.ended)
        return (f"({seconds / 60:.0f} min left)" if seconds > 90 else
                f"({seconds:.0f} s left)")
