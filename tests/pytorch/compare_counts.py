"""Compares the planner's counts of models with transformers.

    compare_counts.py build/chapters/planner/shardbook_plan [FAMILY...] [--write FILE]
    compare_counts.py build/chapters/planner/shardbook_plan --folder FOLDER

For every family that transformers builds: its class's defaults, small configs with one
key changed, and nulls. Parameters in all and per part are those of the model on the meta
device; operations per token are FlopCounterMode's, of a forward and a backward with eager
attention, without the angles of rotary positions. A config that transformers refuses has
to be refused here, too. --write keeps their answers for the tests, in
tests/golden/counted_models.json. --folder compares the config.json files of a folder,
whole and in full size; of files with images, the text model. Code of their own is not run: the class of the
model_type counts, for kimi_k2 DeepSeek's and for mimo Qwen2's. Skipped where there is no transformers 5.24. Exit status
as compare.py's.
"""

import collections
import contextlib
import json
import logging
import pathlib
import subprocess
import sys

import torch_python

torch_python.require_torch()

import torch
from torch.utils.flop_counter import FlopCounterMode

SKIPPED = 77
VERSION = "5.24."  # whose classes' defaults are counted
SEQ = 16
FAMILIES = """
    gpt2 llama mistral qwen2 qwen3 mixtral qwen3_moe gpt_neox gptj codegen gpt_bigcode
    gpt_neo opt bloom falcon mpt phi phi3 phimoe stablelm starcoder2 gemma gemma2
    gemma3_text olmo olmo2 olmo3 olmoe cohere cohere2 granite granitemoe granitemoeshared
    arcee helium seed_oss hunyuan_v1_dense glm glm4 glm4_moe dots1 nemotron dbrx
    deepseek_v3 deepseek_v2 qwen2_moe gpt_oss smollm3 ernie4_5 ernie4_5_moe exaone4
    ministral ministral3 minimax_m2 llama4_text qwen2_vl_text qwen2_5_vl_text
    qwen3_vl_text qwen3_vl_moe_text deepseek_v32 glm_moe_dsa gemma4_text
    mimo_v2_flash
""".split()
TRAINED = "gpt2 llama mistral qwen2 qwen3 mixtral qwen3_moe".split()
# Widths and heads that fail in the forward; windows in the layers without rotary positions; and a
# file that transformers reads with layer_types alone
REFUSED_HERE = {
    ("helium", "head_dim"),
    ("mimo_v2_flash", "num_key_value_heads"),
    ("smollm3", "use_sliding_window"),
    ("exaone4", "sliding_window"),
}
# Keys that a class needs
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "dbrx": {"attn_config": {"rope_theta": 1e4}},
    "qwen3_moe": {"hidden_size": 2048},
    **{kind: {"head_dim": 128} for kind in ("hunyuan_v1_dense", "ministral")},
    **{kind: {"pad_token_id": None} for kind in ("phi3", "glm", "glm4", "smollm3")},
    "nemotron": {"num_key_value_heads": 8},
}
# Types that have no class, and what equals them
CLASS_OF = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
# Keys that a class reads and has no field for
UNNAMED = {
    "gemma4_text": {"num_global_key_value_heads"},
    "glm_moe_dsa": {"index_topk_freq", "index_skip_topk_offset"},
}
# The text models of images and text, which have no class of their own with a head
TEXT_MODELS = {
    "qwen2_vl_text": "Qwen2VLTextModel",
    "qwen2_5_vl_text": "Qwen2_5_VLTextModel",
    "qwen3_vl_text": "Qwen3VLTextModel",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
}
# Small sizes: of several names, the first that the class has
SMALL = [
    (["vocab_size"], 96),
    (["hidden_size", "n_embd", "d_model"], 64),
    (["intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"], 88),
    (["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 4),
    (["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    (["num_key_value_heads"], 2),
    (["head_dim"], 16),
    (["max_position_embeddings", "n_positions", "max_seq_len"], 64),
    (["moe_intermediate_size"], 24),
    (["intermediate_size_mlp"], 72),
    (["shared_expert_intermediate_size", "shared_intermediate_size"], 40),
    (["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 8),
    (["num_experts_per_tok", "moe_k"], 2),
    (["n_group"], 1),
    (["topk_group"], 1),
    (["kv_lora_rank"], 20),
    (["q_lora_rank"], 28),
    (["qk_nope_head_dim"], 12),
    (["qk_rope_head_dim"], 8),
    (["v_head_dim"], 10),
    (["rotary_dim"], 8),
    (["word_embed_proj_dim"], 64),
    (["index_n_heads"], 3),
    (["index_head_dim"], 14),
    (["index_topk"], 5),
    (["hidden_size_per_layer_input"], 6),
    (["vocab_size_per_layer_input"], 80),
]
SMALL_OF = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gpt2": {"n_inner": None},
    # Its class multiplies a token with every expert, and most of them by zero
    "llama4_text": {"num_experts_per_tok": 8},
    # Its class shares out heads of keys that are not there otherwise
    **{
        kind: {"num_key_value_heads": 4}
        for kind in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
    },
    **{
        kind: {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
        for kind in TEXT_MODELS
    },
    "mistral": {"sliding_window": None},
    "gemma4_text": {"global_head_dim": 24},
}
CHANGES = [
    {},
    *({"tie_word_embeddings": on} for on in (True, False)),
    *(
        {key: on}
        for key in """attention_bias attention_out_bias mlp_bias use_bias bias qkv_bias
        use_qkv_bias enable_bias lm_head_bias multi_query parallel_attn use_qk_norm
        qk_layernorm use_parallel_residual layer_norm_elementwise_affine
        do_layer_norm_before alibi norm_topk_prob""".split()
        for on in (True, False)
    ),
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"head_dim": 24},
    {"n_inner": 100},
    {"new_decoder_architecture": True, "num_kv_heads": 2},
    {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    {"new_decoder_architecture": True, "parallel_attn": False},
    {"new_decoder_architecture": True, "parallel_attn": False,
     "num_ln_in_parallel_attn": 1},
    {"num_ln_in_parallel_attn": 2},
    {"multi_query": False, "alibi": True, "bias": True},
    {"word_embed_proj_dim": 48},
    {"first_k_dense_replace": 0},
    {"first_k_dense_replace": 2},
    {"n_shared_experts": 2},
    {"n_shared_experts": 3, "mlp_bias": True},
    {"moe_num_shared_experts": 1},
    {"moe_layer_start_index": 2},
    {"moe_layer_end_index": 2},
    {"moe_layer_interval": 2},
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [1]},
    {"interleave_moe_layer_step": 2},
    {"moe_layers": [0, 3]},
    {"sliding_window": 4},
    {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2},
    {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4},
    {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 4,
        "use_sliding_window": True,
    },
    {"attention_chunk_size": 4},
    {"use_qk_norm": True, "attention_bias": True},
    {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]},
    {"indexer_types": ["full", "shared", "full", "shared"]},
    {"index_topk_freq": 2},
    {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    {"index_topk": 20},
    {"hidden_size_per_layer_input": 0},
    {"attention_k_eq_v": True},
    {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    {"num_global_key_value_heads": 1},
    {"enable_moe_block": True, "top_k_experts": 2},
    {"num_kv_shared_layers": 2},
    *(
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": wide,
        }
        for wide in (True, False)
    ),
    {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 4},
]
NULLS = """hidden_size num_key_value_heads head_dim intermediate_size n_inner
    ffn_hidden_size num_kv_heads word_embed_proj_dim sliding_window q_lora_rank first_k_dense_replace
    n_shared_experts moe_num_shared_experts use_bias tie_word_embeddings mlp_only_layers
    layer_types num_ln_in_parallel_attn multi_query bias attention_types
    attention_chunk_size max_position_embeddings attention_bias shared_intermediate_size v_head_dim""".split()


def part_of(name):
    """The part that a parameter belongs to, by its name."""
    last = ".".join(name.split(".")[-3:])
    if name.startswith(("lm_head", "embed_out", "output_layer")) or "project_out" in name:
        return "head"
    if "embed" in name or "project_in" in name or ".wte" in name or ".wpe" in name:
        return "embedding"
    if "norm" in last or ".ln_" in name:
        return "norm"
    if "shared_expert" in name or "shared_mlp" in name:
        return "shared_experts"
    if "router" in last or ".gate." in name or "moe_statics" in name:
        return "router"
    if "experts" in name:
        return "experts"
    return "attention" if "attn" in name or "attention" in name else "mlp"


def built(kind, keys, device="meta"):
    """The model on the meta device, or on another."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **json.loads(json.dumps(keys)))
    with torch.device(device):
        return model_of(kind, config)


def model_of(kind, config):
    from transformers import AutoModelForCausalLM
    import transformers

    options = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    if kind not in TEXT_MODELS:
        return AutoModelForCausalLM.from_config(config, **options)
    return getattr(transformers, TEXT_MODELS[kind])._from_config(config, **options)


def parts_of(model):
    parts = collections.Counter()
    for name, parameter in model.named_parameters():
        parts[part_of(name)] += parameter.numel()
    return dict(parts)


def kept_of(config):
    """Of SEQ tokens, how many keys a layer keeps, on average over what a token adds."""
    config = config.get_text_config()
    names = ("sliding_window", "attention_chunk_size", "window_size")
    window = next(filter(None, (getattr(config, name, None) for name in names)), SEQ)
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    kinds = kinds or getattr(config, "attention_layers", None)
    if config.model_type == "qwen3_vl_moe_text":  # has the key, and no window
        kinds = ["full_attention"] * layers
    kinds = kinds or ["sliding_attention"] * layers
    whole = [kind in ("full_attention", "global", "indexed_attention") for kind in kinds]
    widths = [1] * layers
    if config.model_type == "gemma4_text":
        each = [config.per_layer_config[layer] for layer in range(layers)]
        widths = [layer.num_key_value_heads * layer.head_dim for layer in each]
        shared = config.num_kv_shared_layers
        widths = [w * (i < layers - shared) for i, w in enumerate(widths)]
    if config.model_type == "mimo_v2_flash":
        widths = [1 if full else 2 for full in whole]
    kept = [w * (SEQ if full else min(window, SEQ)) for w, full in zip(widths, whole)]
    return sum(kept) / sum(widths)


def operations_of(model):
    """Of a forward and of a backward, per token."""
    device = next(model.parameters()).device
    tokens = torch.zeros(1, SEQ, dtype=torch.long, device=device)
    counts = []
    head = 0
    # Some classes read the shape of the mask
    for shape in ((1, 1, SEQ, SEQ), (1, SEQ)):
        mask = torch.zeros(shape, device=device)
        with contextlib.suppress(ValueError):
            with FlopCounterMode(display=False, depth=9) as counter:
                output = model(tokens, attention_mask=mask, use_cache=False)
            break
    if hasattr(output, "logits"):
        result = output.logits
    else:
        result = output.last_hidden_state
        head = 2 * model.config.hidden_size * model.config.vocab_size
    angles = sum(
        sum(each.values())
        for name, each in counter.get_flop_counts().items()
        if name.split(".")[-1].startswith("rotary_emb")
    )
    counts.append(counter.get_total_flops() - angles)
    with FlopCounterMode(display=False) as counter:
        result.sum().backward()
    counts.append(counter.get_total_flops())
    return [counts[0] / SEQ + head, counts[1] / SEQ + 2 * head]


class Comparison:
    def __init__(self, program):
        self.program = program
        self.passed = self.failed = self.refused = 0
        self.without_operations = collections.Counter()
        self.golden = {}

    def counted(self, model, more=()):
        """A file, or a config's text. The count, or None and the refusal."""
        words = [self.program, "--model", str(model), "--format", "json", *more]
        run = subprocess.run(words, capture_output=True, text=True)
        if run.returncode not in (0, 2):
            self.fail(str(model)[:1000], f"status {run.returncode}: {run.stderr}")
        return (json.loads(run.stdout) if run.returncode == 0 else None), run.stderr

    def counted_with_seq(self, keys):
        has_positions = not any(
            value is None and key.startswith("max_pos") for key, value in keys.items()
        )
        is_small = has_positions and keys.get("vocab_size") == 96
        return self.counted(json.dumps(keys), ["--seq", str(SEQ)] if is_small else [])

    def report(self):
        import transformers

        for (kind, why), times in self.without_operations.items():
            print(f"{kind}: operations not counted there, {times} times: {why}")
        print(
            f"{self.passed} equal, {self.refused} refused, {self.failed} failed; "
            f"transformers {transformers.__version__}"
        )
        return 1 if self.failed else 0

    def fail(self, keys, why):
        self.failed += 1
        print(f"FAILED: {json.dumps(keys)}: {why}")

    def compare(self, kind, base, change, counts_operations):
        """One config, in all that the two count."""
        keys = {"model_type": kind, **base, **change}
        case = {"change": change}
        self.golden.setdefault(kind, {}).setdefault(json.dumps(base), []).append(case)
        try:
            model = built(kind, {**base, **change})
        except Exception as error:
            model, why = None, str(error).split("\n")[0]
        else:
            case["parts"] = parts_of(model)
            case["kept"] = kept_of(model.config)
        ours, refusal = self.counted_with_seq(keys)
        if model is None or ours is None:
            if model is not None or ours is not None:
                self.fail(keys, refusal or f"refused there: {why}")
            self.refused += 1
            return
        mine = ours["parts"]
        if kind in TEXT_MODELS:
            mine.pop("head", None)
        if mine != case["parts"]:
            self.fail(keys, f"here {mine}, there {case['parts']}")
            return
        bytes_kept = ours["kv_bytes"]
        if ours["seq"] == SEQ:
            kept = bytes_kept["per_sequence"] / bytes_kept["per_token"]
            if abs(kept - case["kept"]) > 1e-9:
                self.fail(keys, f"keys of {kept} tokens, {case['kept']} there")
        self.passed += 1
        if not counts_operations:
            return
        try:
            if kind == "dbrx":  # Its loop over experts looks at the tokens' choices
                model = built(kind, {**base, **change}, "cpu")
            there = operations_of(model)
        except Exception as error:
            self.without_operations[kind, str(error).split("\n")[0][:200]] += 1
            return
        case["operations"] = there
        here = ours["flops_per_token"]["pytorch"]
        if [here["forward"], here["backward"]] != there:
            self.fail(keys, f"operations {here}, {there}")


def compare_file(comparison, file):
    """A config.json as released. Returns what to print."""
    keys = json.loads(file.read_text())
    ours, refusal = comparison.counted(file, ["--seq", str(SEQ)])
    if ours is None:
        comparison.refused += 1
        return refusal.strip()
    text = keys.get("text_config") or keys
    kind = text.pop("model_type", ours["model_type"])
    if "tie_word_embeddings" in keys:
        text["tie_word_embeddings"] = keys["tie_word_embeddings"]
    for key in ("auto_map", "quantization_config", "dtype", "torch_dtype"):
        text.pop(key, None)
    model = built(CLASS_OF.get(kind, kind), text)
    parts, mine = parts_of(model), dict(ours["parts"])
    if kind in TEXT_MODELS:
        mine.pop("head", None)
    if mine != parts:
        comparison.fail(file.name, f"here {mine}, there {parts}")
        return "parts differ"
    if kind == "llama4_text":  # Its class multiplies with every expert
        text["num_experts_per_tok"] = text["num_local_experts"]
        text["model_type"] = kind
        ours, refusal = comparison.counted(json.dumps(text), ["--seq", str(SEQ)])
    here, there = ours["flops_per_token"]["pytorch"], operations_of(model)
    if [here["forward"], here["backward"]] != there:
        comparison.fail(file.name, f"operations {here}, {there}")
        return "operations differ"
    comparison.passed += 1
    return f"{ours['parameters']:,} parameters, {there[0]:,.0f} operations"


def small_of(kind):
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    fields = set(config.to_dict()) | set(getattr(type(config), "__annotations__", {}))
    fields |= UNNAMED.get(kind, set())
    keys = {}
    for names, value in SMALL:
        for name in names:
            if name in fields:
                keys[name] = value
                break
    if "kv_lora_rank" in keys:
        del keys["head_dim"]
    keys.update(SMALL_OF.get(kind, {}))
    return fields, keys


def write(file, golden, version):
    """One line for each case."""
    with open(file, "w") as out:
        source = f"transformers {version}, tests/pytorch/compare_counts.py"
        out.write(f'{{"source": "{source}",\n')
        out.write(f' "seq": {SEQ},\n "families": {{\n')
        groups = [
            f'  {json.dumps(kind)}: [\n'
            + ",\n".join(
                f'   {{"keys": {base}, "cases": [\n'
                + ",\n".join("    " + json.dumps(case) for case in cases)
                + "]}"
                for base, cases in bases.items()
            )
            + "]"
            for kind, bases in golden.items()
        ]
        out.write(",\n".join(groups) + "}}\n")


def is_tried(kind, change, fields):
    """Leaves out what has no key in the class, or is refused here alone."""
    if "use_sliding_window" in fields and set(change) == {"layer_types", "sliding_window"}:
        return False  # a window that slides in no layer
    if any((kind, key) in REFUSED_HERE for key in change):
        return False
    return set(change) <= fields


def main():
    try:
        import transformers
    except ImportError:
        print("SKIPPED: no transformers")
        return SKIPPED
    if not transformers.__version__.startswith(VERSION):
        print(f"SKIPPED: transformers {transformers.__version__}, not {VERSION}")
        return SKIPPED
    logging.disable()
    transformers.logging.set_verbosity_error()
    words = sys.argv[1:]
    file = words.pop() if "--write" in words else None
    words = [word for word in words if word != "--write"]
    comparison = Comparison(words[0])
    if "--folder" in words:
        for path in sorted(pathlib.Path(words[-1]).glob("*.json")):
            print(f"{path.name}: {compare_file(comparison, path)}", flush=True)
        return comparison.report()
    for kind in words[1:] or FAMILIES:
        before = comparison.failed
        needed = NEEDED.get(kind, {})
        fields, small = small_of(kind)
        # A file of a trained family has to name a size
        if needed or kind not in TRAINED:
            comparison.compare(kind, needed, {}, False)
        small = {**needed, **small}
        for change in CHANGES:
            if is_tried(kind, change, fields):
                comparison.compare(kind, small, change, True)
        for key in NULLS:
            if is_tried(kind, {key: None}, fields):
                comparison.compare(kind, small, {key: None}, False)
        print(f"{kind}: {comparison.failed - before} failed", flush=True)
    if file:
        write(file, comparison.golden, transformers.__version__)
    return comparison.report()


if __name__ == "__main__":
    sys.exit(main())
