"""Draws the options of a run."""

import json

from draw_config import draw_config
from draw_plan import draw_plan


class Draw:
    """The options of one run, or of two."""

    def __init__(self, rng, chapter, backends):
        self.rng = rng
        self.chapter = chapter
        # The chapter whose bill is judged: the engine chooses one
        self.judged_as = chapter
        self.words = []
        # Files in the folder of the run, by name
        self.files = {}
        self.impossible = False
        # Options of a second run in the same folder, after a good one
        self.then = None
        # Of the checkpoint that the run goes on from
        self.steps_before = 0
        if chapter == "plan":
            draw_plan(self)
            if rng.random() < 0.08:
                self.spoil_plan()
            return
        self.draw_shared(backends)
        getattr(self, "draw_" + chapter)()
        self.draw_second()
        if rng.random() < 0.08:
            self.spoil()

    def one_of(self, *values):
        return self.rng.choice(values)

    def sometimes(self, share):
        return self.rng.random() < share

    def give(self, option, value):
        self.words += [option, str(value)]

    def maybe(self, share, option, *values):
        if self.sometimes(share):
            self.give(option, self.one_of(*values))

    def flag(self, share, option):
        """The option, or its opposite: both are said at times."""
        if self.sometimes(share):
            self.words.append(
                option if self.sometimes(0.7) else "--no-" + option[2:])

    def value_of(self, option):
        """The last one that was given, or None."""
        values = [value for key, value in zip(self.words, self.words[1:])
                  if key == option]
        return values[-1] if values else None

    def take_back(self, share, option):
        """The option and its value, or the flag, where it was given."""
        if option not in self.words or not self.sometimes(share):
            return
        at = self.words.index(option)
        is_flag = (at + 1 == len(self.words) or
                   self.words[at + 1].startswith("--"))
        del self.words[at:at + (1 if is_flag else 2)]

    def draw_model(self):
        """A language model (True) or one of images."""
        kind = self.one_of("mlp", "gpt", "gpt", "gpt", "gpt", "resnet",
                           "gpt-nano")
        if self.chapter == "04":
            kind = self.one_of("mlp", "resnet", "resnet")
        self.vocab = 256
        self.layers = {"mlp": 4, "gpt-nano": 6}.get(kind, 0)
        if self.shares_layers() and self.sometimes(0.97):
            kind = "gpt"
        if self.chapter in ("14", "15") and self.sometimes(0.15):
            kind = "resnet"
        if kind == "gpt":
            heads = self.one_of(1, 2, 4)
            blocks = self.rng.randint(1, 7)
            if self.shares_layers():
                heads = self.one_of(4, 8, 8, 12)
                blocks = self.rng.randint(1, 3)
            self.layers = blocks + 2
            self.vocab = self.one_of(256, 256, 50)
            config = {
                "model_type": "gpt2",
                "vocab_size": self.vocab,
                "n_positions": 32,
                "n_embd": heads * self.one_of(4, 8, 16),
                "n_layer": blocks,
                "n_head": heads,
            }
        elif kind == "resnet":
            depths = [self.rng.randint(1, 2)
                      for _ in range(self.rng.randint(2, 4))]
            self.layers = sum(depths) + 2
            config = {
                "model_type": "resnet",
                "depths": depths,
                "layer_type": self.one_of("basic", "bottleneck"),
                "embedding_size": self.one_of(4, 8),
                "num_labels": self.one_of(5, 10, 300),
            }
        else:
            self.give("--model", kind)
            return True
        self.give("--model", json.dumps(config, separators=(",", ":")))
        return kind != "resnet"

    def shares_layers(self):
        """All ranks work on every sample, or on a part of its tokens."""
        return self.chapter >= "07"

    def draw_world_size(self):
        self.world_size = {
            "00": 1, "04": 2,
            "08": self.one_of(1, 4, 4, 4, 3),
            "09": self.one_of(1, 4, 8, 8, 2),
            "10": self.one_of(1, 8, 8, 8, 4),
        }.get(
            self.chapter,
            self.one_of(1, 2, 3, 4) if self.backend == "gloo"
            else self.one_of(1, 2, 2, 3, 4, 4, 6, 8))
        # Mostly a layer for each stage
        if self.chapter in ("05", "06") and self.sometimes(0.9):
            self.world_size = min(self.world_size, self.layers)
        if self.chapter not in ("00", "04"):
            self.give("--world-size", self.world_size)

    def draw_shared(self, backends):
        self.backend = self.one_of(*backends)
        if self.chapter == "00" and self.backend == "gloo":
            self.backend = "threads"
        if self.chapter in ("01", "04") and self.backend == "gloo":
            self.backend = "threads"
        self.give("--backend", self.backend)
        self.is_text = self.draw_model()
        self.draw_world_size()
        if self.is_text:
            self.give("--seq", self.one_of(8, 16, 24, 32)
                      if self.chapter == "12" and self.sometimes(0.9)
                      else self.rng.randint(2, 32))
            data = ["random", "book"] if self.vocab == 256 else ["random"]
            self.give("--data", self.one_of(*data))
            if self.layers != 4 or self.sometimes(0.05):
                self.maybe(0.15, "--dropout", 0.1, 0.5)
        else:
            self.give("--image-size", self.one_of(16, 17, 32))
        self.batch = self.rng.randint(1, 30)
        wants_equal = self.chapter in ("02", "03", "08", "09", "10", "13",
                                       "14", "15")
        if wants_equal and self.sometimes(0.9):
            self.batch = self.world_size * self.rng.randint(1, 4)
        self.give("--batch", self.batch)
        self.give("--steps", self.one_of(0, 1, 1, 2, 2, 3, 4))
        self.give("--seed", self.rng.randint(0, 99))
        self.dtype = self.one_of("f32", "f32", "f32", "f64", "bf16", "f16")
        self.give("--dtype", self.dtype)
        optimizer = self.one_of("sgd", "adam", "adamw")
        self.give("--optimizer", optimizer)
        if optimizer == "sgd" and self.sometimes(0.4):
            self.give("--momentum", 0.9)
            self.flag(0.4, "--nesterov")
        self.maybe(0.2, "--weight-decay", 0.01, 0.1)
        self.maybe(0.2, "--lr", 0.0001, 0.01)
        self.maybe(0.25, "--clip", 0.1, 1, 100)
        self.maybe(0.1, "--lr-schedule", "linear", "cosine")
        self.maybe(0.1, "--warmup", 1, 3)
        clusters = ["dgx-h100", "textbook"]  # with closed forms of a step
        clusters.append("selene" if self.backend == "sim" else "none")
        if self.world_size <= 2 or self.sometimes(0.1):
            clusters.append("kaggle-t4x2")
        self.maybe(0.6, "--cluster", *clusters)
        self.flag(0.2, "--deterministic")
        self.flag(0.1, "--fold")
        self.maybe(0.03, "--device-memory", "64KiB", "1MiB", "1GiB")

    def pieces(self):
        if self.sometimes(0.05):
            return self.batch + self.rng.randint(0, 2)
        return self.rng.randint(1, self.batch)

    def draw_00(self):
        self.maybe(0.6, "--micro-batches", self.pieces())
        self.flag(0.4, "--recompute")
        if self.dtype in ("bf16", "f16"):
            self.flag(0.5, "--master-weights")

    def draw_01(self):
        pass

    def draw_02(self):
        self.maybe(0.6, "--bucket-mb", 0.001, 0.01, 0.1, 1)
        self.maybe(0.5, "--first-bucket-mb", 0.001, 0.01)
        self.flag(0.3, "--find-unused-parameters")
        self.flag(0.3, "--gradient-as-bucket-view")
        self.flag(0.2, "--static-graph")
        self.maybe(0.3, "--micro-batches", 1, 2, 3)
        self.maybe(0.2, "--comm-hook", "bf16", "none")

    def draw_03(self):
        strategy = self.one_of("zero1", "zero2", "zero3", "fsdp", "fsdp2")
        self.give("--strategy", strategy)
        self.maybe(0.3, "--micro-batches", 1, 2, 3)
        self.flag(0.3, "--recompute")
        if strategy.startswith("fsdp"):
            self.flag(0.15, "--cpu-offload")
            if strategy == "fsdp":
                self.maybe(0.5, "--sharding-strategy", "full_shard",
                           "shard_grad_op", "no_shard", "hybrid_shard")
            self.maybe(0.2, "--shard-size", 1, 2)
            self.maybe(0.4, "--wrap", "transformer", "size", "none")
            self.maybe(0.3, "--min-num-params", 100, 1000, 10000)
            self.maybe(0.3, "--backward-prefetch", "pre", "post", "none")
            self.flag(0.2, "--forward-prefetch")
            self.flag(0.2, "--limit-all-gathers")
            self.maybe(0.2, "--param-dtype", "bf16", "f32")
            self.maybe(0.2, "--reduce-dtype", "bf16", "f32")
            self.flag(0.2, "--no-sync")
            return
        if strategy != "zero1":
            self.flag(0.2, "--cpu-offload")
        self.maybe(0.4, "--reduce-bucket-size", 100, 1000, 50000)
        self.maybe(0.4, "--allgather-bucket-size", 100, 1000, 50000)
        self.flag(0.3, "--overlap-comm")
        self.flag(0.3, "--reduce-scatter")
        if strategy == "zero3":
            self.maybe(0.7, "--persistence-threshold", 0, 100, 2000)
            self.maybe(0.4, "--prefetch-bucket-size", 0, 1000, 20000)
        else:
            self.flag(0.2, "--round-robin-gradients")

    def draw_04(self):
        self.maybe(0.7, "--variant", "single", "model_parallel", "pipeline")
        self.maybe(0.8, "--split-size", self.pieces())
        self.maybe(0.3, "--partition", "half", "uniform", "parameters", "time",
                   self.balance())
        self.maybe(0.3, "--loss", "mse", "cross_entropy")
        if self.sometimes(0.05):
            self.give("--sweep", "1,3")
            self.give("--repeats", 1)

    def balance(self):
        """So many layers for each rank, where there are enough."""
        ranks = self.world_size
        if self.layers < ranks:
            return ",".join("1" * ranks)
        cuts = sorted(self.rng.sample(range(1, self.layers), ranks - 1))
        return ",".join(str(b - a) for a, b in
                        zip([0] + cuts, cuts + [self.layers]))

    def draw_05(self):
        self.maybe(0.8, "--micro-batches", self.pieces())
        self.maybe(0.4, "--partition", "uniform", "parameters", "time",
                   self.balance())
        self.maybe(0.6, "--recompute", "always", "except_last", "never")
        self.flag(0.4, "--early-recompute")
        if self.is_text and self.layers != 4:
            self.flag(0.3, "--long-skips")

    def draw_06(self):
        schedule = self.one_of(
            "naive", "gpipe", "1f1b", "interleaved",
            "zb-h1", "zb-h2", "dualpipe", "pipedream",
            "pipedream-2bw")
        self.give("--schedule", schedule)
        if schedule != "pipedream":
            self.maybe(0.8, "--micro-batches", self.pieces(), self.world_size,
                       2 * self.world_size)
        if schedule.startswith("interleaved"):
            self.maybe(0.5, "--chunks", 1, 2, 3)
        if schedule == "pipedream":
            self.maybe(0.2, "--replicas", "2,1", "1,2", "1,1")
        if schedule.startswith("pipedream"):
            self.flag(0.2, "--stash")
            self.flag(0.3, "--vertical-sync")
        if schedule in ("1f1b", "zb-h1", "zb-h2"):
            self.flag(0.2, "--post-validation")
        self.maybe(0.3, "--partition", "uniform", "parameters",
                   self.balance())
        self.maybe(0.3, "--recompute", "always", "except_last", "never")
        self.flag(0.2, "--early-recompute")

    def draw_07(self):
        self.maybe(0.4, "--micro-batches", 1, 2, self.pieces())
        self.flag(0.3, "--recompute")
        self.maybe(0.3, "--vocabulary-divisible-by", 1, 7, 128)

    def draw_passes(self, parts):
        """Micro-batches whose samples `parts` ranks can share, mostly."""
        pieces = self.one_of(1, 2, self.pieces())
        if self.batch % parts == 0 and self.sometimes(0.9):
            each = self.batch // parts
            pieces = self.one_of(*[n for n in range(1, each + 1)
                                   if each % n == 0])
        self.maybe(0.5, "--micro-batches", pieces)
        self.flag(0.3, "--recompute")

    def draw_08(self):
        self.draw_passes({4: 2}.get(self.world_size, 1))

    def draw_09(self):
        self.draw_passes({4: 2, 8: 4}.get(self.world_size, 1))
        self.maybe(0.9, "--depth", {4: 1, 8: 2}.get(self.world_size, 1), 2)

    def draw_10(self):
        self.draw_passes({8: 4}.get(self.world_size, 1))
        self.flag(0.4, "--keep-gathered")

    def draw_11(self):
        ranks = self.world_size
        self.maybe(0.7, "--mesh", *[f"{d}x{ranks // d}" for d in (1, 2, 4)
                                    if ranks % d == 0])
        self.maybe(0.5, "--data-parallel", "fsdp", "ddp")
        self.maybe(0.3, "--micro-batches", 1, 2, 3)

    def draw_12(self):
        kind = self.one_of("ring", "ring", "rsa", "ulysses", "megatron")
        self.give("--kind", kind)
        if kind == "ring" or self.sometimes(0.05):
            self.maybe(0.7, "--layout", "contiguous", "zigzag", "striped")
        if kind == "rsa":
            self.flag(0.3, "--rsa-all-reduce")
        if kind == "megatron":
            self.flag(0.5, "--recompute-attention")
        self.maybe(0.3, "--micro-batches", 1, 2, self.pieces())

    def draw_second(self):
        """Goes on from a checkpoint, or begins with saved weights."""
        if self.backend == "sim" or not self.sometimes(0.12):
            return
        world = []
        if self.sometimes(0.4) and "--world-size" in self.words:
            world = ["--world-size", str(self.one_of(1, 2, 4, 8))]
        if self.sometimes(0.7):
            self.give("--checkpoint", "kept")
            self.maybe(0.3, "--checkpoint-every", 1, 2)
            steps = int(self.value_of("--steps")) + self.one_of(0, 1, 3)
            self.then = ["--resume", "--steps", str(steps)] + world
        else:
            self.give("--save", "saved.safetensors")
            self.then = ["--load", "saved.safetensors", "--save",
                         "again.safetensors"] + world

    def draw_13(self):
        self.maybe(0.7, "--num-experts", 2, 4, 6, 8, "1,4", "2,8")
        self.maybe(0.6, "--ep", *[n for n in (1, 2, 3, 4, 8)
                                  if self.world_size % n == 0])
        self.maybe(0.6, "--top-k", 1, 2, 3)
        self.maybe(0.5, "--capacity-factor", 0.5, 1, 2)
        self.maybe(0.4, "--zero-stage", 0, 1, 2)
        self.flag(0.1, "--cpu-offload")
        self.maybe(0.2, "--min-capacity", 1, 2, 7)
        self.maybe(0.2, "--aux-coefficient", 0, 1)
        if self.world_size % 2 == 0:
            self.maybe(0.2, "--tp", 2)
            self.flag(0.1, "--expert-tp")
        self.maybe(0.3, "--micro-batches", 1, 2, self.pieces())
        self.maybe(0.3, "--noise", "jitter", "rsample", "noisy-top-k")
        self.maybe(0.2, "--drop-policy", "probs", "position")
        for option in ("--dropless", "--naive", "--residual",
                       "--shared-expert", "--gate-shared-expert",
                       "--second-expert-sampling", "--expert-copies",
                       "--data-before-expert", "--no-drop-tokens",
                       "--no-use-rts"):
            self.flag(0.12, option)
        self.maybe(0.2, "--z-coefficient", 0.001)

    def draw_14(self):
        left = self.world_size
        for option in ("--tp", "--pp", "--cp"):
            degree = self.one_of(*[n for n in (1, 2, 3, 4) if left % n == 0])
            left //= degree
            if degree > 1 or self.sometimes(0.2):
                self.give(option, degree)
            if option == "--cp" and degree > 1:
                self.maybe(0.4, "--cp-kind", "ring", "rsa", "ulysses")
                self.maybe(0.3, "--cp-layout", "zigzag", "striped")
        if self.batch % left == 0 and self.sometimes(0.95):
            each = self.batch // left
            self.give("--micro-batches",
                      self.one_of(*[n for n in range(1, each + 1)
                                    if each % n == 0]))
        self.maybe(0.6, "--zero-stage", 0, 1, 1, 1, 2, 3)
        self.flag(0.3, "--sequence-parallel")
        self.maybe(0.4, "--schedule", "1f1b", "gpipe", "interleaved", "zb-h1",
                   "zb-h2", "dualpipe", "pipedream")
        self.maybe(0.2, "--chunks", 2, 3)
        self.maybe(0.3, "--recompute", "always", "except_last", "never",
                   "blocks", "attention")
        self.maybe(0.2, "--partition", "uniform", "parameters", "time",
                   "type:block", "1,2")
        self.maybe(0.3, "--order", "megatron", "colossal-ai", "pp-cp-tp-dp")
        self.maybe(0.2, "--bucket-bytes", 0, 1000, "1MiB")
        self.flag(0.2, "--overlap-grad-reduce")
        self.maybe(0.1, "--dp", left, 2)
        if self.sometimes(0.35):
            self.draw_hybrid_experts(left)
        if self.dtype in ("bf16", "f16"):
            self.flag(0.4, "--accumulate-f32")
            self.maybe(0.3, "--loss-scale", 1, 1024, 1e9)
            self.maybe(0.2, "--loss-scale-window", 1, 2)
            self.maybe(0.2, "--hysteresis", 1, 2)
            self.maybe(0.3, "--scaler", "deepspeed", "deepspeed-0.17.1",
                       "megatron")

    def draw_hybrid_experts(self, replicas):
        self.give("--num-experts", self.one_of(2, 4, 8))
        self.maybe(0.7, "--ep", *[n for n in (1, 2, 4) if replicas % n == 0])
        self.maybe(0.4, "--top-k", 1, 2, 3)
        self.maybe(0.4, "--capacity-factor", 0.5, 1, 2)
        self.maybe(0.2, "--aux-coefficient", 0, 1)
        self.flag(0.2, "--expert-tp")

    def draw_15(self):
        draw_config(self)

    def spoil(self):
        """Adds what cannot be meant."""
        self.impossible = True
        nowhere = "/no/such/folder/file"
        option, value = self.one_of(
            ("--batch", "0"), ("--batch", "1e3"), ("--dtype", "f8"),
            ("--model", "gpt-giga"), ("--model", "{\"n_embd\":3,\"n_head\":2}"),
            ("--model", "{"), ("--seq", "-1"), ("--seq", "100000"),
            ("--lr", "fast"), ("--lr", "nan"), ("--world-size", "0"),
            ("--world-size", "1000000"), ("--backend", "mpi"),
            ("--nothing", "1"), ("--cluster", "nowhere"),
            ("--data", nowhere), ("--data-format", "u16"),
            ("--load", nowhere), ("--save", nowhere),
            ("--log", nowhere), ("--device-memory", "10X"), ("--steps", "-1"),
            ("--steps", ""), ("--dropout", "1"), ("--optimizer", "lamb"),
            ("--momentum", "2"), ("--format", "xml"), ("--timeout", "0"),
            ("--checkpoint", nowhere),
            ("--checkpoint-every", "3.5"), ("--report", nowhere))
        if option == "--seq" and not self.is_text:
            option, value = "--image-size", "0"
        if option == "--data" and not self.is_text:
            value = "book"
        self.give(option, value)

    def spoil_plan(self):
        """A question without sense."""
        self.impossible = True
        self.give(*self.one_of(
            ("--batch", "0"), ("--batch", "1e3"), ("--seq", "100000"),
            ("--model", "resnet50"), ("--model", "gpt-giga"),
            ("--model", "."), ("--cluster", "nowhere"), ("--tp", "0"),
            ("--world-size", "1000000"), ("--nodes", "99999"),
            ("--zero-stage", "4"), ("--schedule", "gpipe"), ("--top", "0"),
            ("--dtype", "f64"), ("--nothing", "1"), ("--dropout", "nan"),
            ("--write-config", "/no/such/folder/file"),
            ("--device-memory", "10X"), ("--recompute", "all")))
