"""Runs programs, and ends them when a signal comes.

Each program has a process group of its own, so that one signal reaches it and
all that it started. Signals are blocked in this process: they take effect only
while it waits for a program, and never interrupt its own work on files.
"""

import os
import signal
import sys
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
BUILD = os.path.join(ROOT, "build")

# A signal that the caller ignores, as nohup does, stays ignored.
_stopping = {number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
             if signal.getsignal(number) != signal.SIG_IGN}


class Stopped(BaseException):
    """A signal asks this process to end."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number


def say(text, end="\n"):
    """Prints a line on stderr; results of programs are on stdout."""
    os.write(2, os.fsencode(text + end))


def die(text):
    """Reports a mistake in the command, and exits with status 2."""
    say("shardbook: " + text)
    sys.exit(2)


def run(command, output=None, environment=None):
    """Runs a program and returns its status, 128 + n after signal n.

    Its stdout goes to the file `output` if there is one. Throws Stopped when a
    signal comes: then the program and all that it started have ended.
    """
    return run_side_by_side([command], 1, output=output,
                            environment=environment)[0]


def run_side_by_side(commands, at_once, on_start=lambda k: None, on_end=None,
                     output=None, environment=None, statuses=None):
    """Runs programs in their order, `at_once` at a time; returns their statuses.

    Calls on_start(k) before program k starts. With on_end, nothing that they
    write to stderr is shown: on_end(k, text) gets it when program k has ended.
    A list `statuses`, of None, has those of the programs that have ended, also
    when it throws. All else is as run() says.
    """
    if statuses is None:
        statuses = [None] * len(commands)
    running = {}  # the place of each program, and the file of its errors

    def finish_one():
        program, status = _wait_for_one(running)
        k, errors = running.pop(program)
        # Ctrl-C reaches a program that has just started, too
        if status > 128:
            _check_signals()
        statuses[k] = status
        if errors:
            with errors:
                errors.seek(0)
                on_end(k, errors.read())

    try:
        for k, command in enumerate(commands):
            _check_signals()
            if len(running) == at_once:
                finish_one()
            on_start(k)
            errors = open(os.memfd_create("stderr"), "rb") if on_end else None
            running[_start(command, output, errors, environment)] = k, errors
        while running:
            finish_one()
    except (OSError, Stopped) as error:
        _end(running, getattr(error, "number", signal.SIGTERM))
        raise
    return statuses


def _start(command, output, errors, environment):
    files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    if output:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        files.append((os.POSIX_SPAWN_OPEN, 1, output, flags, 0o666))
    if errors:
        files.append((os.POSIX_SPAWN_DUP2, errors.fileno(), 2))
    return os.posix_spawnp(
        command[0], command, {**os.environ, **(environment or {})},
        file_actions=files, setpgroup=0, setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ])  # ignored by Python


def _wait_for_one(running):
    """Waits until one of the programs ends; returns it, and its status."""
    while True:
        # One SIGCHLD may stand for several programs, so all are asked.
        for program in running:
            ended, status = os.waitpid(program, os.WNOHANG)
            if ended:
                return program, _status_of(status)
        number = signal.sigwait(_stopping | {signal.SIGCHLD})
        if number in _stopping:
            raise Stopped(number)


def _status_of(status):
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _end(running, number):
    """Passes the signal on, gives the groups five seconds, then kills them."""
    deadline = time.monotonic() + 5
    left = {program for program in running if _signal_group(program, number)}
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = {program for program in left if _signal_group(program, 0)}
    for program in left:
        _signal_group(program, signal.SIGKILL)


def _signal_group(program, number):
    """Whether one of the program's group was there to get the signal."""
    try:
        _reap(program)
        os.killpg(program, number)
        return True
    except ProcessLookupError:
        return False


def _reap(program):
    """A program that has ended belongs to its group until it is waited for."""
    try:
        os.waitpid(program, os.WNOHANG)
    except ChildProcessError:
        pass


def pause(seconds):
    """Waits; throws Stopped when a signal comes."""
    waiting = signal.sigtimedwait(_stopping, seconds)
    if waiting:
        raise Stopped(waiting.si_signo)


def _check_signals():
    pause(0)


def _end_by(number):
    """Ending by the signal itself tells a calling script to stop as well."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def _describe(error):
    return ": ".join(str(part) for part in (error.filename, error.strerror)
                     if part)


def _guarded(work):
    """The status that `work` returns, unless a signal comes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _stopping | {signal.SIGCHLD})
    # Where the caller ignored SIGCHLD, none would come.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        status = work()
        _check_signals()
        return status
    except Stopped as stopped:
        say(f"\nshardbook: stopped by {signal.Signals(stopped.number).name}")
        return _end_by(stopped.number)
    except BrokenPipeError:
        return _end_by(signal.SIGPIPE)
    except OSError as error:
        say("shardbook: " + _describe(error))
        return 1


def main(print_targets, work):
    """Serves ./shardbook, which starts a program twice.

    With `targets`, `print_targets` names what Ninja has to build; with `run`,
    `work` returns the status to end with. Both take the words that follow.
    """
    # ./shardbook sets this for the start of Python alone.
    os.environ.pop("PYTHONCOERCECLOCALE", None)
    action, *words = sys.argv[1:]
    if action == "targets":
        print_targets(*words)
    else:
        sys.exit(_guarded(lambda: work(*words)))
