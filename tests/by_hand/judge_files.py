"""Judges the files that a run was asked for: each is there, and whole."""

import json
import struct


def judge_files(words, folder):
    """What is wrong with the files of a run that ended well, or None."""
    given = dict(zip(words, words[1:]))
    for option, problem_of in (
            ("--trace", trace_problem), ("--timeline", trace_problem),
            ("--log", log_problem), ("--save", weights_problem),
            ("--checkpoint", checkpoint_problem)):
        name = given.get(option)
        if name in (None, "text"):
            continue
        path = folder / name
        # A run that goes on behind its last step has no events
        steps = int(given["--steps"])
        if problem_of is trace_problem and "--resume" in words:
            steps = 0
        try:
            problem = problem_of(path, steps)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            return ("file", f"{option} {name}: {problem}")
    return None


def strict(text):
    """JSON of the standard, which has no NaN."""
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def trace_problem(path, steps):
    events = strict(path.read_text("utf-8"))["traceEvents"]
    for event in events:
        if event["ph"] == "X" and event["dur"] < 0:
            return f"ends before it begins: {event}"
    if steps and not any(event["ph"] == "X" for event in events):
        return "no event has a duration"
    return None


def log_problem(path, steps):
    lines = [strict(line) for line in path.read_text("utf-8").splitlines()]
    numbers = [line["step"] for line in lines]
    if numbers != list(range(steps)):
        return f"steps {numbers} of {steps}"
    return None


def weights_problem(path, _):
    """A header whose tensors fill the rest of the file, one after another."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = strict(data[8:8 + size])
    spans = sorted(tensor["data_offsets"] for name, tensor in header.items()
                   if name != "__metadata__")
    at = 0
    for begin, end in spans:
        if begin != at:
            return f"a tensor begins at {begin}, the one before ends at {at}"
        at = end
    if 8 + size + at != len(data):
        return f"tensors end at {8 + size + at} of {len(data)} bytes"
    return None


def checkpoint_problem(path, steps):
    """The newest one has a part of each rank, and nothing is half-written."""
    names = sorted(each.name for each in path.iterdir() if each.name != ".lock")
    if any(name.startswith(".") for name in names) or bool(names) != (steps > 0):
        return f"it has {names} after {steps} steps"
    for name in names[-1:]:
        folder = path / name
        manifest = strict((folder / "manifest.json").read_text("utf-8"))
        ranks = manifest["ranks"]
        for part in range(1, ranks + 1):
            file = f"rank-{part:05}-of-{ranks:05}.safetensors"
            problem = weights_problem(folder / file, 0)
            if problem:
                return f"{name}/{file}: {problem}"
    return None
