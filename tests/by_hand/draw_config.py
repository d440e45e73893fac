"""Draws a config for the engine: DeepSpeed's keys, mostly a legal set.

Now and then a rule is broken: its refusal has to be a sentence.
"""

import json


def draw_config(draw):
    """Gives --config, and takes back options that the config has a key for."""
    config = Config(draw)
    text = json.dumps(config.keys)
    if draw.sometimes(0.08):
        draw.impossible = True
        text = spoil(draw, config.keys)
    # On the command line a config is known by its first brace
    if draw.sometimes(0.3) or not text.startswith("{"):
        draw.files["ds.json"] = text
        text = "ds.json"
    draw.give("--config", text)


class Config:
    def __init__(self, draw):
        self.draw = draw
        self.keys = {}
        self.dp = draw.world_size
        self.zero = {}
        self.book = {}
        self.accumulation = draw.one_of(1, 1, 2, 3, 4)
        self.rows = 1  # parts of a micro-batch
        self.may_sum_in_f32 = False
        getattr(self, "draw_" + draw.one_of(*self.kinds()))()
        if self.zero:
            self.keys["zero_optimization"] = self.zero
        if self.book:
            self.keys["shardbook"] = self.book
        self.draw_batch()
        self.draw_precision()
        self.draw_optimizer()

    def maybe(self, share, section, key, *values):
        if self.draw.sometimes(share):
            section[key] = self.draw.one_of(*values)

    def keeps_rule(self):
        return self.draw.keeps_rule()

    def kinds(self):
        """Strategies that fit the model, the ranks and the dtype."""
        draw = self.draw
        if not self.keeps_rule():
            return ["plain", "fsdp", "experts", "grid", "hybrid"]
        kinds = ["plain"] * 3 + ["hybrid"] * 3
        if not draw.is_text:
            return kinds if draw.world_size == 1 else ["hybrid"]
        if draw.kind != "mlp":
            kinds.append("experts")
        # Only some chapters scale the loss of f16
        if draw.dtype != "f16":
            kinds.append("fsdp")
            if draw.world_size in (1, 4, 8) and draw.kind != "mlp":
                kinds.append("grid")
        return kinds

    # --- Strategies -----------------------------------------------------------

    def draw_plain(self):
        zero = self.zero
        stage = self.draw.one_of(0, 0, 1, 2, 3)
        if not self.draw.is_text and self.keeps_rule():
            stage = 0
        zero["stage"] = stage
        self.may_sum_in_f32 = stage >= 2 or (stage == 1 and self.draw.is_text)
        self.draw_buckets()
        self.maybe(0.2, zero, "overlap_comm", True, False)
        self.maybe(0.1, zero, "contiguous_gradients", True, False)
        if stage >= 2:
            self.maybe(0.25, zero, "offload_optimizer", {"device": "cpu"},
                       {"device": "none"})
        if stage == 3:
            self.maybe(0.4, zero, "stage3_param_persistence_threshold", 0,
                       1000)
            self.maybe(0.3, zero, "stage3_prefetch_bucket_size", 0, 5000)
            self.maybe(0.4, zero, "stage3_max_reuse_distance", 0, 3000,
                       20000)
            self.maybe(0.3, zero, "stage3_max_live_parameters", 1, 5000,
                       30000)
            if "offload_optimizer" in zero:
                self.maybe(0.5, zero, "offload_param", {"device": "cpu"})
        if stage in (1, 2):
            self.maybe(0.2, zero, "round_robin_gradients", True)
            self.maybe(0.2, zero, "allgather_partitions", True, False)
        if stage == 0:
            self.maybe(0.2, self.keys, "prescale_gradients", True)
        else:
            self.maybe(0.2, zero, "sub_group_size", 100, 5000)
        self.maybe(0.2, self.keys, "communication_data_type", "fp32", "bf16")
        is_free = stage == 0 and "prescale_gradients" not in self.keys
        if is_free or not self.keeps_rule():
            self.maybe(0.1, self.keys, "gradient_predivide_factor", 1.0, 2.0)
        self.maybe(0.2, self.book, "recompute", "never", "attention",
                   "blocks")

    def draw_buckets(self):
        self.maybe(0.3, self.zero, "reduce_bucket_size", 100, 5e4, 500000000)
        self.maybe(0.3, self.zero, "allgather_bucket_size", 100, 5e4)
        self.maybe(0.2, self.zero, "reduce_scatter", True, False)

    def draw_fsdp(self):
        self.zero["stage"] = 3
        self.book["sharding"] = self.draw.one_of("fsdp", "fsdp2")
        self.maybe(0.3, self.book, "recompute", "never", "blocks",
                   "attention")
        if self.draw.sometimes(0.2):
            self.zero["offload_optimizer"] = {"device": "cpu"}
            self.maybe(0.9, self.zero, "offload_param", {"device": "cpu"})

    def draw_experts(self):
        draw = self.draw
        counts = [2, 4, 8] + [[1, 4], [2, 8]] * (draw.layers > 3)
        count = draw.one_of(*counts)
        fewest = min(n for n in (count if isinstance(count, list)
                                 else [count]) if n > 1)
        experts = self.book["experts"] = {"num_experts": count}
        tp = 2 if draw.sometimes(0.2) and self.dp % 2 == 0 else 1
        if tp > 1:
            self.cut("tensor_parallel", tp)
            if self.keeps_rule():
                # Its ranks share an expert's slots, here twice the tokens
                experts["capacity_factor"] = 16
        self.maybe(0.5, experts, "ep_size",
                   *[n for n in self.divisors(self.dp)
                     if fewest % n == 0 or not self.keeps_rule()])
        self.maybe(0.4, experts, "top_k", 1, 2)
        if tp == 1:
            self.maybe(0.4, experts, "capacity_factor", 0.5, 1, 2)
        self.maybe(0.2, experts, "min_capacity", 0, *[1] * (tp == 1), 8)
        self.maybe(0.2, experts, "noisy_gate_policy", "None", "Jitter")
        self.maybe(0.2, experts, "aux_coefficient", 0, 0.1)
        for key in ("drop_tokens", "use_rts"):
            self.maybe(0.1, experts, key, False)
        for key in ("use_residual", "use_data_before_expert_parallelism",
                    *["enable_expert_tensor_parallelism"] *
                    (tp > 1 or not self.keeps_rule())):
            self.maybe(0.1, experts, key, True)
        self.maybe(0.5, self.zero, "stage", 0, 1, 2)
        if self.zero.get("stage") == 2:
            self.maybe(0.3, self.zero, "cpu_offload", True)
        draw.judged_as = "13"

    def draw_grid(self):
        mode, depth = {
            1: ("2d", 1), 4: ("2d", 1), 8: self.draw.one_of(("2.5d", 2),
                                                            ("3d", 1)),
        }.get(self.draw.world_size, ("2d", 1))
        self.book["tensor_parallel"] = {"size": self.draw.world_size,
                                        "mode": mode}
        if depth > 1:
            self.book["tensor_parallel"]["depth"] = depth
        self.dp = 1
        self.rows = {4: 2, 8: 4}.get(self.draw.world_size, 1)

    def draw_hybrid(self):
        draw = self.draw
        pp = self.degree("pipeline", lambda n: n <= draw.layers,
                         least=1 if draw.is_text else 2)
        tp = self.degree("tensor_parallel", lambda n: draw.heads % n == 0)
        cp = self.degree("context_parallel", lambda n: draw.is_text)
        if tp > 1 and cp > 1 and self.keeps_rule():
            draw.take_back(1, "--dropout")
        self.draw_sequence(tp, cp)
        self.draw_hybrid_zero(pp)
        self.maybe(0.2, self.book, "recompute", "never",
                   *["attention"] * draw.is_text, "blocks")
        if pp > 1:
            self.draw_stages(pp)
        if (draw.sometimes(0.25) and draw.kind != "mlp"
                and (draw.is_text or not self.keeps_rule())):
            self.draw_hybrid_experts(tp)

    def degree(self, axis, is_legal, least=1):
        """Ranks along an axis, taken from those that are left for replicas."""
        can = [n for n in self.divisors(self.dp)
               if n == 1 or is_legal(n) or not self.keeps_rule()]
        # Replicas alone train no images
        degree = self.draw.one_of(*[n for n in can if n >= least] or can)
        if degree > 1 or self.draw.sometimes(0.2):
            self.cut(axis, degree)
        return degree

    def draw_sequence(self, tp, cp):
        """How tokens are cut; --seq becomes a multiple of the parts."""
        parts = cp
        if cp > 1:
            context = self.book["context_parallel"]
            ulysses = self.draw.heads // tp % cp == 0 or not self.keeps_rule()
            self.maybe(0.4, context, "kind", "ring", "rsa",
                       *["ulysses"] * ulysses)
            if context.get("kind", "ring") == "ring" or not self.keeps_rule():
                self.maybe(0.3, context, "layout", "contiguous", "zigzag",
                           "striped")
            parts *= 1 + (context.get("layout") == "zigzag")
        tensor = self.book.get("tensor_parallel", {})
        if tensor.get("size", 1) > 1:
            self.maybe(0.3, tensor, "sequence_parallel", True)
            parts *= tp if "sequence_parallel" in tensor else 1
        if self.keeps_rule():
            self.draw.cut_sequence(parts)

    def draw_hybrid_zero(self, pp):
        stages = [0, 1, 1]
        if (pp == 1 and self.draw.is_text) or not self.keeps_rule():
            stages += [2, 3]
        self.maybe(0.5, self.zero, "stage", *stages)
        self.maybe(0.2, self.zero, "reduce_bucket_size", 100, 5e4)
        self.may_sum_in_f32 = (self.zero.get("stage", 0) == 1
                               and self.draw.is_text)

    def draw_stages(self, pp):
        """The order of micro-batches, whose number has to fit it."""
        draw = self.draw
        if draw.sometimes(0.6):
            schedules = ["1f1b", "gpipe", "zb-h1", "zb-h2"]
            schedules += ["interleaved"] * (2 * pp <= draw.layers)
            schedules += ["dualpipe"] * (pp % 2 == 0)
            if not self.keeps_rule():
                schedules = ["pipedream"]
            self.book["schedule"] = draw.one_of(*schedules)
        unit = {"interleaved": pp, "dualpipe": 2 * pp}.get(
            self.book.get("schedule"), 1)
        if self.keeps_rule():
            self.accumulation *= unit
        self.maybe(0.2, self.keys["pipeline"],
                   "activation_checkpoint_interval", 0, 1)
        stages = pp * (1 + (self.book.get("schedule") == "interleaved"))
        by_type = ["type:block"] * (draw.is_text and draw.layers > stages + 1)
        self.maybe(0.2, self.keys["pipeline"], "partition", "uniform",
                   "parameters", *by_type)

    def draw_hybrid_experts(self, tp):
        count = self.draw.one_of(2, 4, 8)
        if self.zero.get("stage") == 3 and self.keeps_rule():
            self.zero["stage"] = 2
        experts = self.book["experts"] = {"num_experts": count}
        experts["ep_size"] = self.draw.one_of(
            *[n for n in self.divisors(self.dp) if count % n == 0])
        self.maybe(0.3, experts, "top_k", 1, 2)
        if tp > 1 and self.keeps_rule():
            # Its ranks share an expert's slots, here tp times the tokens
            experts["capacity_factor"] = tp * count

    def cut(self, axis, degree):
        """`degree` ranks along an axis, under one of its names."""
        self.dp //= degree
        if axis == "pipeline":
            self.keys["pipeline"] = {"stages": degree}
        elif axis == "tensor_parallel" and self.draw.sometimes(0.3):
            self.keys["tensor_parallel"] = {"autotp_size": degree}
        else:
            self.book[axis] = {"size": degree}

    def divisors(self, of):
        return [n for n in (1, 2, 3, 4, 8) if of % n == 0]

    # --- What all strategies have ---------------------------------------------

    def draw_batch(self):
        draw, dp = self.draw, max(self.dp, 1)
        micro = self.rows * draw.rng.randint(1 if draw.is_text else 2, 3)
        batch = dp * self.accumulation * micro
        keys = {"train_batch_size": batch,
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": self.accumulation}
        if not self.keeps_rule():
            keys["train_batch_size"] += 1
        # Two keys give the third, one means no accumulation
        can_go = draw.one_of(0, 0, 1, 2) if self.accumulation == 1 else (
            draw.one_of(0, 0, 1))
        for key in draw.rng.sample(sorted(keys), can_go):
            del keys[key]
        self.keys.update(keys)
        if [*keys] == ["gradient_accumulation_steps"]:
            draw.set("--batch", batch)
        elif self.keeps_rule():
            draw.take_back(1, "--batch")

    def draw_precision(self):
        draw = self.draw
        if draw.dtype not in ("f16", "bf16"):
            self.maybe(0.1, self.keys, "fp16", {"enabled": False})
            return
        if self.keeps_rule():
            draw.take_back(1, "--dtype")
        if draw.dtype == "bf16":
            self.keys["bf16"] = {"enabled": True}
            return
        fp16 = {"enabled": True}
        self.maybe(0.5, fp16, "initial_scale_power", 4, 8, 16, 30)
        self.maybe(0.2, fp16, "loss_scale", 0, 128)
        self.maybe(0.2, fp16, "loss_scale_window", 1, 2)
        self.maybe(0.2, fp16, "hysteresis", 1, 2)
        self.maybe(0.1, fp16, "auto_cast", True)
        self.keys["fp16"] = fp16

    def draw_optimizer(self):
        draw = self.draw
        self.maybe(0.3, self.keys, "gradient_clipping", 0, 0.5, 1.0, "auto")
        if "gradient_clipping" in self.keys and self.keeps_rule():
            draw.take_back(1, "--clip")
        self.maybe(0.1, self.keys, "steps_per_print", 1, 2)
        self.maybe(0.1, self.keys, "dump_state", True)
        self.maybe(0.1, self.keys, "sparse_gradients", False)
        self.maybe(0.1, self.keys, "activation_checkpointing",
                   {"partition_activations": True}, {"number_checkpoints": 4})
        if ((draw.dtype != "f64" and self.may_sum_in_f32)
                or draw.dtype == "f32" or not self.keeps_rule()):
            self.maybe(0.1, self.keys, "data_types",
                       {"grad_accum_dtype": "fp32"})
        self.maybe(0.1, self.keys, "wall_clock_breakdown", True)
        if draw.sometimes(0.6):
            for option in ("--optimizer", "--lr", "--weight-decay",
                           "--momentum"):
                draw.take_back(1, option)
            draw.take_back(1, "--nesterov")
            kind = draw.one_of("Adam", "AdamW", "SGD")
            params = {}
            self.maybe(0.6, params, "lr", 1e-3, 1e-2, "auto")
            self.maybe(0.3, params, "weight_decay", 0, 0.1)
            if kind == "SGD":
                self.maybe(0.5, params, "momentum", 0, 0.9)
            else:
                self.maybe(0.3, params, "betas", [0.8, 0.999])
            if kind == "Adam":
                self.maybe(0.3, params, "adam_w_mode", True, False)
            self.keys["optimizer"] = {"type": kind, "params": params}
        if draw.sometimes(0.3):
            for option in ("--lr-schedule", "--warmup"):
                draw.take_back(1, option)
            params = {"warmup_num_steps": draw.one_of(0, 1, 2, 10)}
            self.maybe(0.5, params, "warmup_max_lr", 1e-3)
            self.maybe(0.3, params, "warmup_type", "log", "linear")
            kind = draw.one_of("WarmupLR", "WarmupDecayLR")
            if kind == "WarmupDecayLR":
                self.maybe(0.9, params, "total_num_steps", 10, 20)
            self.keys["scheduler"] = {"type": kind, "params": params}


def spoil(draw, keys):
    """The text of a config that cannot be meant."""
    text = json.dumps(keys)
    how = draw.one_of("type", "unknown", "nested", "number", "text", "auto")
    if how == "text":
        return draw.one_of("", "[]", "{", text + "}", text[:-1], "null",
                           '{"train_batch_size": NaN}', "\0", "{'a': 1}")
    spoilt = json.loads(text)
    if how == "unknown":
        spoilt[draw.one_of("optimiser", "zero", "amp", "")] = 1
        return json.dumps(spoilt)
    section, key, good = draw.one_of(
        ("zero_optimization", "stage", 1), ("optimizer", "params", {}),
        ("fp16", "enabled", True), ("pipeline", "stages", 1),
        ("shardbook", "tensor_parallel", {}), ("scheduler", "params", {}))
    if how == "nested":
        spoilt.setdefault(section, {})["no_such_key"] = good
    elif how == "auto":
        spoilt["steps_per_print"] = "auto"
    elif how == "number":
        spoilt["gradient_clipping"] = draw.one_of(
            -1, 1e308, "1", [1])
    else:
        bad = draw.one_of(None, "x", [], -1, 1e400, [[1]])
        if draw.sometimes(0.5):
            spoilt[section] = bad
        else:
            spoilt.setdefault(section, {})[key] = bad
    return json.dumps(spoilt)
