"""Draws a legal set of degrees and of what goes with them, for chapter 14.

Now and then a rule is broken: its refusal has to be a sentence.
"""

from draw_chapters import partitions


def draw_hybrid(draw):
    Hybrid(draw)


class Hybrid:
    def __init__(self, draw):
        self.draw = draw
        self.dp = draw.world_size
        self.experts = 1
        # A Mixtral's own
        self.own_experts = "num_local_experts" in str(draw.words)
        self.pp = self.degree("--pp", lambda n: n <= draw.layers)
        self.tp = self.degree("--tp", lambda n: draw.heads % n == 0)
        self.cp = self.degree("--cp", lambda n: draw.is_text)
        draw.maybe(0.1, "--dp", self.dp)
        # Masks of cut heads of a cut sequence have no seed
        if self.tp > 1 and self.cp > 1 and draw.keeps_rule():
            draw.take_back(1, "--dropout")
        if draw.is_text or not draw.keeps_rule():
            self.draw_sequence()
        self.draw_stages()
        if self.own_experts and draw.keeps_rule():
            draw.maybe(0.7, "--ep", *[n for n in (1, 2, 4) if self.dp % n == 0])
        elif draw.sometimes(0.35) and (draw.is_text or not draw.keeps_rule()):
            self.draw_experts()
        self.draw_zero()
        draw.maybe(0.3, "--order", "megatron", "colossal-ai", "pp-cp-tp-dp")
        draw.maybe(0.2, "--bucket-bytes", 0, 1000, "1MiB")
        self.draw_precision()

    def degree(self, option, is_legal):
        """Ranks along an axis, taken from those that are left for replicas."""
        draw = self.draw
        can = [n for n in (1, 2, 3, 4, 8) if self.dp % n == 0
               and (n == 1 or is_legal(n) or not draw.keeps_rule())]
        chosen = draw.one_of(*can)
        self.dp //= chosen
        if chosen > 1 or draw.sometimes(0.2):
            draw.give(option, chosen)
        return chosen

    def draw_sequence(self):
        """How tokens are cut; --seq becomes a multiple of the parts."""
        draw, parts = self.draw, self.cp
        kinds = ["ring", "rsa"]
        if draw.heads // self.tp % self.cp == 0:
            kinds.append("ulysses")
        kind = draw.one_of(*kinds)
        if self.cp > 1 and draw.sometimes(0.6):
            draw.give("--cp-kind", kind)
        else:
            kind = "ring"
        if (self.cp > 1 and kind == "ring") or not draw.keeps_rule():
            layout = draw.one_of("contiguous", "zigzag", "striped")
            draw.maybe(0.5, "--cp-layout", layout)
            if draw.value_of("--cp-layout") == "zigzag":
                parts *= 2
        is_cut = self.own_experts or draw.sometimes(0.4)
        if (self.tp > 1 and is_cut) or not draw.keeps_rule():
            draw.words.append("--sequence-parallel")
            parts *= self.tp
        draw.cut_sequence(parts)

    def draw_experts(self):
        draw = self.draw
        self.experts = draw.one_of(2, 4, 8)
        draw.give("--num-experts", self.experts)
        draw.maybe(0.7, "--ep", *[n for n in (1, 2, 4) if self.dp % n == 0
                                  and self.experts % n == 0])
        draw.maybe(0.4, "--top-k", *[k for k in (1, 2, 3)
                                     if k <= self.experts])
        if self.tp == 1 or not draw.keeps_rule():
            draw.maybe(0.4, "--capacity-factor", 0.5, 1, 2)
        else:
            # Its ranks share an expert's slots, here tp times the tokens
            draw.give("--capacity-factor", self.tp * self.experts)
        draw.maybe(0.2, "--aux-coefficient", 0, 1)
        if self.tp > 1 or not draw.keeps_rule():
            draw.flag(0.2, "--expert-tp")

    def draw_stages(self):
        """Micro-batches, and the order in which stages work on them."""
        draw, pp = self.draw, self.pp
        schedule, chunks = "1f1b", 1
        if pp > 1 and draw.sometimes(0.6):
            schedules = ["1f1b", "gpipe", "zb-h1", "zb-h2"]
            if pp * 2 <= draw.layers:
                schedules += ["interleaved"] * 2
            if pp % 2 == 0:
                schedules.append("dualpipe")
            schedule = draw.one_of(*schedules)
            if not draw.keeps_rule():
                schedule = "pipedream"
            draw.give("--schedule", schedule)
        if schedule == "interleaved":
            chunks = draw.one_of(*[v for v in (2, 3)
                                   if v * pp <= draw.layers])
            draw.give("--chunks", chunks)
        unit = {"interleaved": pp, "dualpipe": 2 * pp}.get(schedule, 1)
        pieces = unit * draw.one_of(1, 1, 2)
        if unit == 1:
            pieces = draw.rng.randint(1, 4)
        draw.give("--micro-batches", pieces)
        if draw.keeps_rule():
            draw.share_batch(self.dp * pieces, least=1 if draw.is_text else 2)
        stages = pp * chunks
        by_type = ["type:block"] * (draw.is_text and draw.layers > stages + 1)
        draw.maybe(0.2, "--partition", *partitions(draw, stages, by_type))

    def draw_zero(self):
        """Stages 2 and 3 have no pipeline, and images only stage 1."""
        draw = self.draw
        stages = [0, 1, 1]
        if (self.pp == 1 and draw.is_text) or not draw.keeps_rule():
            stages += ([] if self.own_experts and draw.keeps_rule() else
                       [2] if self.experts > 1 else [2, 3])
        stage = draw.one_of(*stages)
        if stage or draw.sometimes(0.3):
            draw.give("--zero-stage", stage)
        modes = ["never", "blocks"] + ["attention"] * draw.is_text
        if stage < 2:
            modes += ["always", "except_last"]
            draw.flag(0.2, "--overlap-grad-reduce")
        draw.maybe(0.3, "--recompute", *modes)
        if (stage < 2 and draw.is_text and draw.is_narrow()
                or not draw.keeps_rule()):
            draw.flag(0.4, "--accumulate-f32")

    def draw_precision(self):
        draw = self.draw
        if not draw.is_narrow():
            return
        draw.maybe(0.3, "--loss-scale", 1, 1024, 1e9)
        draw.maybe(0.2, "--loss-scale-window", 1, 2)
        draw.maybe(0.2, "--hysteresis", 1, 2)
        draw.maybe(0.3, "--scaler", "deepspeed", "deepspeed-0.17.1",
                   "megatron")
