// ---- A plan as arguments of Megatron-LM's pretrain_gpt.py, and what they
// ---- cannot say. The names are those of megatron-core 0.20 (arguments.py, and
// ---- the configs from which it makes options).

// Sizes of a config.json, of a GPT-2 or of the Llama family.
function sizes_of(config) {
  const of = (...keys) =>
      keys.map((key) => config[key]).find((value) => value != null);
  const hidden = of("hidden_size", "n_embd");
  const heads = of("num_attention_heads", "n_head");
  return {
    type: config.model_type, hidden, heads,
    layers: of("num_hidden_layers", "n_layer"),
    positions: of("max_position_embeddings", "n_positions"),
    vocabulary: config.vocab_size,
    groups: of("num_key_value_heads") ?? heads,
    head: of("head_dim") ?? hidden / heads,
    mlp: of("intermediate_size", "n_inner") ?? 4 * hidden,
    is_llama: config.model_type !== "gpt2",
    is_tied: config.tie_word_embeddings ?? config.model_type === "gpt2",
    epsilon: of("rms_norm_eps", "layer_norm_epsilon") ?? 1e-5,
    base: of("rope_theta") ?? 10000,
    scaling: config.rope_scaling?.factor,
    experts: of("num_local_experts", "num_experts") ?? 0,
    top_k: of("num_experts_per_tok"),
    expert: of("moe_intermediate_size") ?? of("intermediate_size"),
  };
}

function model_arguments(model) {
  const words = [
    `--num-layers ${model.layers}`, `--hidden-size ${model.hidden}`,
    `--ffn-hidden-size ${model.mlp}`,
    `--num-attention-heads ${model.heads}`,
    `--max-position-embeddings ${model.positions}`,
    `--norm-epsilon ${model.epsilon}`,
    "--tokenizer-type NullTokenizer", `--vocab-size ${model.vocabulary}`,
    "--make-vocab-size-divisible-by 1", "--mock-data",
    "--attention-dropout 0", "--hidden-dropout 0"];
  if (!model.is_llama) return words;
  words.push("--normalization RMSNorm", "--swiglu", "--disable-bias-linear",
             "--position-embedding-type rope", `--rotary-base ${model.base}`);
  if (model.head !== model.hidden / model.heads) {
    words.push(`--kv-channels ${model.head}`);
  }
  if (model.groups !== model.heads) {
    words.push("--group-query-attention",
               `--num-query-groups ${model.groups}`);
  }
  if (model.scaling) {
    words.push("--use-rope-scaling", `--rope-scaling-factor ${model.scaling}`);
  }
  if (!model.is_tied) words.push("--untie-embeddings-and-output-weights");
  if (model.type === "qwen2") words.push("--add-qkv-bias");
  if (model.type.startsWith("qwen3")) words.push("--qk-layernorm");
  if (model.experts > 0) {
    words.push(`--num-experts ${model.experts}`,
               `--moe-router-topk ${model.top_k}`,
               `--moe-ffn-hidden-size ${model.expert}`,
               "--moe-token-dispatcher-type alltoall",
               "--expert-tensor-parallel-size 1");
  }
  return words;
}

// The blocks of each stage, from the --partition of the plan's command, which
// counts the embedding and the head, too.
function cut_arguments(plan) {
  const partition = /--partition ([\d,]+)/.exec(plan.command)?.[1];
  if (plan.pp === 1 || !partition) return [];
  const blocks = partition.split(",").map(Number);
  blocks[0] -= 1;
  blocks[blocks.length - 1] -= 1;
  if (blocks.every((count) => count === blocks[0])) {
    return plan.schedule === "interleaved"
        ? [`--num-layers-per-virtual-pipeline-stage ${blocks[0]}`] : [];
  }
  const last = blocks.length - 1;
  const layout = blocks.map((count, i) => [
    i === 0 ? "E" : "", count > 1 ? `t*${count}` : count === 1 ? "t" : "",
    i === last ? "L" : ""].join("")).join("|");
  return [`--pipeline-model-parallel-layout "${layout}"`];
}

const RECOMPUTED = {
  never: [], attention: ["--recompute-granularity selective"],
  blocks: ["--recompute-granularity full", "--recompute-method uniform",
           "--recompute-num-layers 1"] };
const FSDP = (shards) => ["--use-megatron-fsdp",
                          `--data-parallel-sharding-strategy ${shards}`,
                          "--ckpt-format fsdp_dtensor"];
const ZERO = [[], ["--use-distributed-optimizer"], FSDP("optim_grads"),
              FSDP("optim_grads_params")];

// { text, missing }: arguments, and the keys of sentences on what they lack.
function megatron(plan, result, model) {
  const words = [
    `--tensor-model-parallel-size ${plan.tp}`,
    `--pipeline-model-parallel-size ${plan.pp}`,
    `--context-parallel-size ${plan.cp}`,
    ...(plan.ep > 1 ? [`--expert-model-parallel-size ${plan.ep}`] : []),
    ...(plan.sequence_parallel ? ["--sequence-parallel"] : []),
    ...ZERO[plan.zero_stage], ...cut_arguments(plan),
    ...RECOMPUTED[plan.recompute],
    `--micro-batch-size ${plan.micro_batch}`,
    `--global-batch-size ${result.batch}`, `--seq-length ${result.seq}`,
    // In Megatron-LM, gradients of bf16 are f32 unless this is asked for
    ...{ bf16: ["--bf16", "--grad-reduce-in-bf16"], f16: ["--fp16"],
         f32: [] }[result.dtype],
    "--clip-grad 0", ...model_arguments(model)];
  const missing = [
    [plan.schedule === "zb-h1" && plan.pp > 1, "megatron_zb"],
    [plan.zero_stage >= 2, "megatron_fsdp"],
    [plan.offload, "megatron_offload"],
    [model.experts > 0 && plan.tp > 1, "megatron_experts"],
    [result.planned_as, "megatron_stand_in"],
    [true, "megatron_yours"]];
  return { text: words.join(" \\\n"),
           missing: missing.filter(([holds]) => holds).map(([, key]) => key) };
}

function megatron_of(best, result, config) {
  const known = result.planned_as ?? config ??
      JSON.parse(document.getElementById("models").textContent)[result.model];
  if (!known) return [];
  const { text, missing } = megatron(best, result, sizes_of(known));
  return [source(say("megatron"), text),
          make("ul", {}, ...missing.map((key) => make("li", {
            text: say(key) })))];
}
