"""Draws the options of chapters 00 to 13, mostly a legal set of them."""


def pieces(draw):
    """Micro-batches of any size."""
    if not draw.keeps_rule():
        return draw.batch + draw.rng.randint(0, 2)
    return draw.rng.randint(1, draw.batch)


def ceil_pieces(draw, unit=1, least=1):
    """Micro-batches, a multiple of unit, that rule CEIL leaves as many."""
    if not draw.keeps_rule():
        return pieces(draw)
    even = [n for n in range(least, draw.batch + 1) if n % unit == 0
            and -(-draw.batch // -(-draw.batch // n)) == n]
    if even and draw.sometimes(0.7):
        return draw.one_of(*even)
    least += -least % unit
    count = least + unit * draw.rng.randint(0, 2)
    draw.share_batch(count)
    return count


def share_passes(draw, parts):
    """Micro-batches that `parts` ranks share equally."""
    count = draw.one_of(1, 2, 3)
    if draw.keeps_rule():
        draw.share_batch(parts * count)
    if count > 1 or draw.sometimes(0.3):
        draw.give("--micro-batches", count)


def draw_00(draw):
    draw.maybe(0.6, "--micro-batches", pieces(draw))
    draw.flag(0.4, "--recompute")
    if draw.is_narrow():
        draw.flag(0.5, "--master-weights")


def draw_01(_):
    pass


def draw_02(draw):
    draw.maybe(0.6, "--bucket-mb", 0.001, 0.01, 0.1, 1)
    draw.maybe(0.5, "--first-bucket-mb", 0.001, 0.01)
    draw.flag(0.3, "--find-unused-parameters")
    draw.flag(0.3, "--gradient-as-bucket-view")
    draw.flag(0.2, "--static-graph")
    share_passes(draw, draw.world_size)
    draw.maybe(0.2, "--comm-hook", "bf16", "none")


def draw_03(draw):
    strategy = draw.one_of("zero1", "zero2", "zero3", "fsdp", "fsdp2")
    draw.give("--strategy", strategy)
    share_passes(draw, draw.world_size)
    draw.flag(0.3, "--recompute")
    if strategy.startswith("fsdp"):
        draw_fsdp(draw, strategy)
        return
    if strategy != "zero1":
        draw.flag(0.2, "--cpu-offload")
    if strategy == "zero3":
        draw.maybe(0.7, "--persistence-threshold", 0, 100, 2000)
        draw.maybe(0.4, "--prefetch-bucket-size", 0, 1000, 20000)
    if strategy != "zero3" or not draw.keeps_rule():
        draw.maybe(0.4, "--reduce-bucket-size", 100, 1000, 50000)
        draw.maybe(0.4, "--allgather-bucket-size", 100, 1000, 50000)
        draw.flag(0.2, "--round-robin-gradients")
        draw.flag(0.3, "--reduce-scatter")
    draw.flag(0.3, "--overlap-comm")


def draw_fsdp(draw, strategy):
    draw.flag(0.15, "--cpu-offload")
    if strategy == "fsdp":
        draw.maybe(0.5, "--sharding-strategy", "full_shard",
                   "shard_grad_op", "no_shard", "hybrid_shard")
    is_hybrid = draw.value_of("--sharding-strategy") == "hybrid_shard"
    if is_hybrid or not draw.keeps_rule():
        draw.give("--shard-size", draw.one_of(
            *[n for n in (1, 2) if draw.world_size % n == 0]))
    draw.maybe(0.4, "--wrap", "transformer", "size", "none")
    if draw.value_of("--wrap") == "size" or not draw.keeps_rule():
        draw.maybe(0.7, "--min-num-params", 100, 1000, 10000)
    draw.maybe(0.3, "--backward-prefetch", "pre", "post", "none")
    draw.flag(0.2, "--forward-prefetch")
    draw.flag(0.2, "--limit-all-gathers")
    draw.maybe(0.2, "--param-dtype", "bf16", "f32")
    draw.maybe(0.2, "--reduce-dtype", "bf16", "f32")
    draw.flag(0.2, "--no-sync")


def draw_04(draw):
    draw.maybe(0.7, "--variant", "single", "model_parallel", "pipeline")
    draw.maybe(0.8, "--split-size", pieces(draw))
    draw.maybe(0.3, "--partition", *partitions(draw, 2, ["half"]))
    losses = ["cross_entropy"]
    if not draw.is_text or not draw.keeps_rule():
        losses.append("mse")
    draw.maybe(0.3, "--loss", *losses)
    if draw.sometimes(0.05):
        draw.give("--sweep", "1,3")
        draw.give("--repeats", 1)


def partitions(draw, stages, more=()):
    """Where so many stages may be cut; `time` needs a cluster."""
    can = ["uniform", "parameters", draw.balance(stages), *more]
    if draw.value_of("--cluster") != "none" or not draw.keeps_rule():
        can.append("time")
    return can


def draw_05(draw):
    draw.maybe(0.8, "--micro-batches", pieces(draw))
    draw.maybe(0.4, "--partition", *partitions(draw, draw.world_size))
    draw.maybe(0.6, "--recompute", "always", "except_last", "never")
    draw.flag(0.4, "--early-recompute")
    if draw.kind in ("gpt", "gpt-nano"):
        draw.flag(0.3, "--long-skips")


def draw_06(draw):
    ranks = draw.world_size
    schedule = draw.one_of(*schedules(draw))
    draw.give("--schedule", schedule)
    flushes = not schedule.startswith("pipedream")
    stages = ranks
    if schedule == "interleaved":
        chunks = draw.one_of(*[v for v in (2, 3)
                               if v == 2 or v * ranks <= draw.layers])
        draw.maybe(0.9 if chunks == 2 else 1, "--chunks", chunks)
        stages *= chunks
    if schedule == "pipedream":
        cut_replicas(draw)
        stages = len((draw.value_of("--replicas") or "1," * ranks)
                     .strip(",").split(","))
    else:
        draw.give("--micro-batches", ceil_pieces(draw, *{
            "interleaved": (ranks, ranks), "dualpipe": (2, 2 * ranks),
            "pipedream-2bw": (1, ranks)}.get(schedule, ())))
    if not flushes and draw.keeps_rule():
        # Stages update by themselves: no norm of all
        draw.take_back(1, "--clip")
    if schedule == "pipedream" or not draw.keeps_rule():
        draw.flag(0.2, "--stash")
        draw.flag(0.3, "--vertical-sync")
    if schedule in ("1f1b", "zb-h1", "zb-h2"):
        draw.flag(0.2, "--post-validation")
    draw.maybe(0.3, "--partition", *partitions(draw, stages))
    if ((schedule != "naive" and "--no-stash" not in draw.words)
            or not draw.keeps_rule()):
        draw.maybe(0.3, "--recompute", "always", "except_last", "never")
    draw.flag(0.2, "--early-recompute")


def schedules(draw):
    """Those that fit the ranks and the layers."""
    ranks = draw.world_size
    names = ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "pipedream",
             "pipedream-2bw"]
    if 2 * ranks <= draw.layers or not draw.keeps_rule():
        names.append("interleaved")
    if ranks % 2 == 0 or not draw.keeps_rule():
        names.append("dualpipe")
    return names


def cut_replicas(draw):
    """PipeDream's stages on several ranks: steps are shared by replicas."""
    ranks = draw.world_size
    if ranks < 2 or not draw.sometimes(0.3):
        return
    first = draw.rng.randint(1, ranks - 1)
    draw.give("--replicas", f"{first},{ranks - first}")
    rounds = first * (ranks - first)
    if draw.keeps_rule():
        draw.set("--steps", rounds * draw.one_of(0, 1, 2))


def draw_07(draw):
    draw.maybe(0.4, "--micro-batches", 1, 2, pieces(draw))
    draw.flag(0.3, "--recompute")
    draw.maybe(0.3, "--vocabulary-divisible-by", 1, 7, 128)


def draw_08(draw):
    share_passes(draw, {4: 2}.get(draw.world_size, 1))
    draw.flag(0.3, "--recompute")


def draw_09(draw):
    share_passes(draw, {4: 2, 8: 4}.get(draw.world_size, 1))
    draw.flag(0.3, "--recompute")
    depth = {8: 2}.get(draw.world_size, 1)
    if depth == 2 or draw.sometimes(0.8):
        draw.give("--depth", depth if draw.keeps_rule() else 3 - depth)


def draw_10(draw):
    share_passes(draw, {8: 4}.get(draw.world_size, 1))
    draw.flag(0.3, "--recompute")
    draw.flag(0.4, "--keep-gathered")


def draw_11(draw):
    ranks = draw.world_size
    replicas = draw.one_of(*[d for d in (1, 2, 3, 4, 6, 8) if ranks % d == 0
                             and (draw.heads % (ranks // d) == 0
                                  or not draw.keeps_rule())] or [ranks])
    draw.give("--mesh", f"{replicas}x{ranks // replicas}")
    share_passes(draw, replicas)
    draw.maybe(0.5, "--data-parallel", "fsdp", "ddp")
    if draw.is_text and draw.sometimes(0.4):
        draw.words.append("--sequence-parallel")
        draw.cut_sequence(ranks // replicas)


def draw_12(draw):
    kinds = ["ring", "ring", "rsa"]
    if draw.heads % draw.world_size == 0 or not draw.keeps_rule():
        kinds += ["ulysses", "megatron"]
    kind = draw.one_of(*kinds)
    draw.give("--kind", kind)
    parts = draw.world_size
    if kind == "ring" or not draw.keeps_rule():
        draw.maybe(0.7, "--layout", "contiguous", "zigzag", "striped")
        parts *= 1 + (draw.value_of("--layout") == "zigzag")
    if draw.keeps_rule():
        draw.cut_sequence(parts)
    if kind == "rsa":
        draw.flag(0.3, "--rsa-all-reduce")
    if kind == "megatron":
        draw.flag(0.5, "--recompute-attention")
    draw.maybe(0.3, "--micro-batches", 1, 2, pieces(draw))


def draw_13(draw):
    counts = ["2", "4", "6", "8"] + ["1,4", "2,8"] * (draw.layers > 3)
    experts = draw.one_of(*counts)
    tp = 2 if draw.world_size % 2 == 0 and draw.sometimes(0.2) else 1
    groups = draw.world_size // tp
    fewest = min(int(n) for n in experts.split(",") if n != "1")
    draw.give("--num-experts", experts)
    draw.maybe(0.6, "--ep", *[n for n in (1, 2, 3, 4, 8) if groups % n == 0
                              and (fewest % n == 0 or not draw.keeps_rule())])
    top_k = draw.one_of(*[k for k in (1, 1, 2, 3)
                          if k <= fewest or not draw.keeps_rule()])
    draw.give("--top-k", top_k)
    draw.maybe(0.5, "--capacity-factor", 0.5, 1, 2)
    draw.maybe(0.4, "--zero-stage", 0, 1, 2)
    if draw.value_of("--zero-stage") == "2" or not draw.keeps_rule():
        draw.flag(0.3, "--cpu-offload")
    draw.maybe(0.2, "--min-capacity", 1, 2, 7)
    draw.maybe(0.2, "--aux-coefficient", 0, 1)
    if tp > 1:
        draw.give("--tp", tp)
        draw.flag(0.4, "--expert-tp")
        # Its ranks share an expert's slots, here twice the tokens
        if draw.keeps_rule():
            draw.take_back(1, "--capacity-factor")
            draw.give("--capacity-factor", 2 * int(experts.split(",")[-1]))
    share_passes(draw, groups)
    noises = ["jitter", "noisy-top-k"]
    if top_k == 1 or not draw.keeps_rule():
        noises.append("rsample")
    draw.maybe(0.3, "--noise", *noises)
    draw.maybe(0.2, "--drop-policy", "probs", "position")
    for option in ("--dropless", "--naive", "--residual", "--shared-expert",
                   "--second-expert-sampling", "--expert-copies",
                   "--data-before-expert"):
        draw.flag(0.12, option)
    for option in ("--drop-tokens", "--use-rts"):
        draw.flag(0.3, option)
    if "--shared-expert" in draw.words or not draw.keeps_rule():
        draw.flag(0.3, "--gate-shared-expert")
    draw.maybe(0.2, "--z-coefficient", 0.001)
