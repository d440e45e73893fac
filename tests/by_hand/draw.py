"""Draws the options of a run."""

import json

import draw_chapters
from draw_config import draw_config
from draw_hybrid import draw_hybrid
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
        draw_own = {"14": draw_hybrid, "15": draw_config}
        (draw_own.get(chapter) or getattr(draw_chapters, "draw_" + chapter))(
            self)
        self.draw_files()
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

    def set(self, option, value):
        """Another value of an option that was given."""
        self.words[self.words.index(option) + 1] = str(value)

    def keeps_rule(self):
        """Options are mostly legal together; refusals are runs as well."""
        return not self.sometimes(0.03)

    def is_narrow(self):
        return self.dtype in ("bf16", "f16")

    def share_batch(self, parts, least=1):
        """Makes --batch so many equal parts of at least `least` samples."""
        most = max(least, 30 // parts)
        self.batch = parts * self.rng.randint(least, most)
        self.set("--batch", self.batch)

    def cut_sequence(self, parts):
        """Makes --seq so many equal parts."""
        if self.is_text:
            self.set("--seq", parts * self.rng.randint(1, 32 // parts))

    def balance(self, stages):
        """So many layers for each stage, where there are enough."""
        if self.layers < stages:
            return ",".join("1" * stages)
        cuts = sorted(self.rng.sample(range(1, self.layers), stages - 1))
        return ",".join(str(b - a) for a, b in
                        zip([0] + cuts, cuts + [self.layers]))

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
        if kind == "resnet" and not self.trains_images() and self.keeps_rule():
            kind = "gpt"
        self.vocab = 256
        self.layers = {"mlp": 4, "gpt-nano": 6}.get(kind, 0)
        self.heads = {"gpt-nano": 4}.get(kind, 1)
        if self.shares_layers() and self.sometimes(0.97):
            kind = "gpt"
        if self.chapter in ("14", "15") and self.sometimes(0.15):
            kind = "resnet"
        self.kind = kind
        if kind == "gpt":
            heads = self.one_of(1, 2, 4)
            blocks = self.rng.randint(1, 7)
            if self.shares_layers():
                heads = self.one_of(4, 8, 8, 12)
                blocks = self.rng.randint(1, 3)
            self.layers = blocks + 2
            self.heads = heads
            self.vocab = self.one_of(256, 256, 50)
            config = {
                "model_type": "gpt2",
                "vocab_size": self.vocab,
                "n_positions": 32,
                "n_embd": heads * self.one_of(4, 8, 16),
                "n_layer": blocks,
                "n_head": heads,
            }
            if self.sometimes(0.4):
                kind = self.kind = "llama"
                config = self.llama(heads, blocks)
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

    def llama(self, heads, blocks):
        """Of the Llama family; where chapter 13 runs, with experts."""
        kind = self.one_of("llama", "mistral", "qwen2", "qwen3")
        often = {"13": 1, "14": 0.4}.get(self.chapter, 0.1)
        if self.sometimes(often):
            kind = self.one_of("mixtral", "qwen3_moe")
        width = self.one_of(4, 8, 16)
        config = {
            "model_type": kind,
            "vocab_size": self.vocab,
            "max_position_embeddings": 32,
            "hidden_size": heads * self.one_of(4, 8, 16),
            "num_hidden_layers": blocks,
            "num_attention_heads": heads,
            "num_key_value_heads": self.one_of(
                *[k for k in (1, 2, 4, 8, 12) if heads % k == 0]),
            "head_dim": width,
            "intermediate_size": self.one_of(24, 32, 48),
            "tie_word_embeddings": self.one_of(True, False),
        }
        if kind in ("mixtral", "qwen3_moe"):
            config["num_local_experts"] = self.one_of(4, 8)
            config["num_experts_per_tok"] = self.one_of(1, 2, 3)
            config["output_router_logits"] = (
                self.one_of(True, False)
                if self.chapter != "14" or not self.keeps_rule() else False)
        if kind == "qwen3_moe":
            config["moe_intermediate_size"] = self.one_of(8, 24)
        return config

    def trains_images(self):
        """Batch norm sees one rank's images only."""
        return self.chapter in ("00", "04", "05", "14", "15")

    def shares_layers(self):
        """All ranks work on every sample, or on a part of its tokens."""
        return self.chapter >= "07"

    def draw_world_size(self):
        sizes = [1, 2, 3, 4] if self.backend == "gloo" else [1, 2, 2, 3, 4, 4,
                                                             6, 8]
        shapes = {"00": [1], "04": [2], "08": [1, 4, 4], "09": [1, 4, 8, 8],
                  "10": [1, 8, 8]}  # squares and cubes, one on another
        if self.chapter in shapes and self.keeps_rule():
            sizes = shapes[self.chapter]
        if self.chapter in ("05", "06") and self.keeps_rule():
            sizes = [n for n in sizes if n <= self.layers]
        if self.chapter == "07" and self.keeps_rule():
            sizes = [n for n in sizes if self.heads % n == 0]
        self.world_size = self.one_of(*sizes)
        if self.chapter in ("00", "04"):
            self.world_size = shapes[self.chapter][0]
        else:
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
            self.give("--seq", self.rng.randint(2, 32))
            data = ["random", "book"] if self.vocab == 256 else ["random"]
            self.give("--data", self.one_of(*data))
            if self.kind not in ("mlp", "llama") or not self.keeps_rule():
                self.maybe(0.15, "--dropout", 0.1, 0.5)
        else:
            self.give("--image-size", self.one_of(16, 17, 32))
        self.batch = self.rng.randint(1, 30)
        if self.chapter == "15" and self.keeps_rule():
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
        if self.world_size <= 2 or not self.keeps_rule():
            clusters.append("kaggle-t4x2")
        self.maybe(0.6, "--cluster", *clusters)
        self.flag(0.2, "--deterministic")
        self.flag(0.1, "--fold")
        self.maybe(0.03, "--device-memory", "64KiB", "1MiB", "1GiB")

    def draw_files(self):
        """What a run writes beside what it prints."""
        self.maybe(0.15, "--trace", "trace.json")
        self.maybe(0.2, "--log", "log.jsonl")
        if self.value_of("--cluster") != "none" or not self.keeps_rule():
            self.maybe(0.15, "--timeline", "timeline.json")
        # Shapes have no weights, and those of some runs are not in one file
        if ((self.backend != "sim" and "--long-skips" not in self.words
             and "pipedream" not in (self.value_of("--schedule") or ""))
                or not self.keeps_rule()):
            self.maybe(0.15, "--save", "saved.safetensors")
            self.maybe(0.15, "--checkpoint", "kept")

    def draw_second(self):
        """Goes on from the checkpoint, or begins with the saved weights."""
        world = []
        if self.sometimes(0.4) and "--world-size" in self.words:
            world = ["--world-size", str(self.one_of(1, 2, 4, 8))]
        if "--checkpoint" in self.words:
            self.maybe(0.3, "--checkpoint-every", 1, 2)
            steps = int(self.value_of("--steps")) + self.one_of(0, 1, 3)
            self.then = ["--resume", "--steps", str(steps)] + world
        elif "--save" in self.words:
            self.then = ["--load", "saved.safetensors", "--save",
                         "again.safetensors"] + world

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
