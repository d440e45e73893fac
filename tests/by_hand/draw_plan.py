"""Draws a question for the planner, and judges its answer."""

import json


def draw_plan(draw):
    blocks = draw.rng.randint(1, 8)
    heads = draw.one_of(1, 2, 4, 8, 12)
    seq = draw.one_of(8, 64, 100, 512)
    draw.files["model.json"] = json.dumps({
        "model_type": "gpt2", "vocab_size": draw.one_of(50, 256, 50257),
        "n_positions": seq, "n_embd": heads * draw.one_of(8, 64),
        "n_layer": blocks, "n_head": heads})
    draw.give("--model", draw.one_of("model.json", "model.json", "gpt2",
                                     "gpt-1.3b"))
    cluster, per_node = draw.one_of(("dgx-a100", 8), ("dgx-h100", 8),
                                    ("dgx-v100", 8), ("kaggle-t4x2", 2))
    draw.give("--cluster", cluster)
    draw.world_size = draw.one_of(1, 2, 3, 4, 8, 16)
    if cluster == "kaggle-t4x2":
        draw.world_size = draw.one_of(1, 2)
    if draw.world_size >= per_node and draw.sometimes(0.5):
        draw.give("--nodes", draw.world_size // per_node)
    else:
        draw.give("--world-size", draw.world_size)
    draw.batch = draw.world_size * draw.rng.randint(1, 8)
    draw.give("--batch", draw.batch)
    draw.maybe(0.2, "--seq", 8, seq)
    # The default is bf16, which only Ampere and later compute
    has_bf16 = cluster in ("dgx-a100", "dgx-h100") or not draw.keeps_rule()
    draw.maybe(0.3 if has_bf16 else 1, "--dtype", "f32", "f16",
               *["bf16"] * has_bf16)
    draw.maybe(0.1, "--dropout", 0.1)
    draw.maybe(0.2, "--device-memory", "1MiB", "20MiB", "2GiB")
    draw.maybe(0.3, "--top", 1, 3, 20)
    left = draw.world_size
    for option in ("--tp", "--pp", "--cp"):
        degree = draw.one_of(*[n for n in (1, 2, 3, 4) if left % n == 0
                               or not draw.keeps_rule()])
        if draw.sometimes(0.1):
            draw.give(option, degree)
            left = max(left // degree, 1)
    draw.maybe(0.15, "--zero-stage", 0, 1, 2, 3)
    draw.maybe(0.1, "--micro-batch", 1, 2, 3)
    draw.maybe(0.1, "--schedule", "1f1b", "interleaved", "zb-h1")
    draw.maybe(0.1, "--recompute", "never", "attention", "blocks")
    draw.flag(0.2, "--offload")
    draw.flag(0.2, "--prune")
    draw.flag(0.1, "--confirm")
    # Pruning must not change the answer; the config must be one.
    if draw.sometimes(0.3):
        draw.then = "unpruned"
    elif draw.sometimes(0.4):
        draw.give("--write-config", "ds.json")
        draw.then = "read config"


def judge_plan(draw, status, out):
    """What is wrong with an answer, or None."""
    try:
        answer = json.loads(out)
    except ValueError as error:
        return ("output", f"no JSON: {error}")
    best = answer["best"]
    if (status == 0) != bool(best):
        return ("status", f"status {status} with {len(best)} plans")
    seconds = [plan["step_s"] for plan in best]
    if seconds != sorted(seconds):
        return ("claim", f"not sorted: {seconds}")
    for plan in best:
        ranks = plan["dp"] * plan["tp"] * plan["pp"] * plan["cp"]
        samples = plan["dp"] * plan["micro_batches"] * plan["micro_batch"]
        if ranks != draw.world_size:
            return ("claim", f"{ranks} ranks: {plan['layout']}")
        if samples != draw.batch:
            return ("claim", f"{samples} samples: {plan['layout']}")
        if plan["memory_bytes"]["total"] > answer["usable_memory_bytes"]:
            return ("claim", f"does not fit: {plan['layout']}")
        if not 0 < plan["mfu"] <= 1:
            return ("claim", f"mfu {plan['mfu']}: {plan['layout']}")
        for option in ("--tp", "--pp", "--cp", "--zero-stage",
                       "--micro-batch", "--schedule", "--recompute"):
            given = draw.value_of(option)
            key = option[2:].replace("-", "_")
            # One stage has no schedule
            if option == "--schedule" and plan["pp"] == 1:
                continue
            if given is not None and str(plan[key]) != given:
                return ("claim", f"{option} {given}: {plan['layout']}")
    return None


def judge_same_plans(out, unpruned):
    """Plans that bounds have left out must not be among the best."""
    one, two = ([(plan["layout"], plan["work"], plan["step_s"])
                 for plan in json.loads(text)["best"]]
                for text in (out, unpruned))
    if [plan[2] for plan in one] != [plan[2] for plan in two]:
        return ("claim", f"pruned {one[:2]}, all {two[:2]}")
    return None
