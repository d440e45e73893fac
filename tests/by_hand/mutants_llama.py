"""Mutants of the Llama family's config.json and weights."""

from mutants import folder

# --- The decoder -------------------------------------------------------------------

block = folder("chapters/common/models", "single_device")

block("block.cpp", "return static_cast<double>(in) / (is_cut ? t : 1);",
      "return static_cast<double>(in) / t;", "BlockTable.*")
block("block.cpp", "(bias ? wide / (cut == Cut::kColumns ? t : 1) : 0)",
      "(bias ? wide / t : 0)", "BlockTable.*")
block("block.cpp", "return static_cast<double>(heads) / (heads > 1 ? t : 1);",
      "return static_cast<double>(heads);", "BlockTable.*")
block("block.cpp", "? 2 * (seq + 1) * wide : 0;", "? 2 * seq * wide : 0;",
      "BlockTable.*")
# Keys turn as queries do
block("models.cpp", "rope(all, table, heads + kv_heads, d)",
      "rope(all, table, heads, d)", "Golden/Llama.L*")
block("models.cpp", "(parts.empty() ? heads : kv_heads)", "heads",
      "Golden/Llama.L*")
# An output layer of its own
block("models.cpp", "lm_head ? *lm_head : embedding.wte", "embedding.wte",
      "Golden/Llama.L*")
block("models.cpp", "if (table.size(0) == s && ", "if (", "LlamaAngles.*")

# --- config.json -------------------------------------------------------------------

keys = folder("chapters/common/models/internal", "single_device")
models = folder("chapters/common/models", "single_device")

# A null is a default for some classes only
keys("llama_json.cpp", "if (may_be_null && is_null(object, key)) return implied;",
     "if (is_null(object, key)) return implied;", "LlamaConfig.ANull*")
keys("llama_json.cpp", "SB_CHECK(heads % llama.kv_heads == 0, label,",
     "SB_CHECK(llama.kv_heads > 0, label,", "LlamaConfig.SizesThat*")
# A qwen2 has biases on q, k and v, without a key that says so
keys("llama_json.cpp", "llama.qkv_bias = on_attention || is_qwen2;",
     "llama.qkv_bias = on_attention;", "LlamaConfig.AnAbsent*")
keys("llama_json.cpp", "if (family.has_window_switch) return is_on ? window : 0;",
     "if (family.has_window_switch) return window;", "LlamaConfig.Windows*")
keys("llama_json.cpp", "window > 0 ? first : config.n_layer",
     "window > 0 ? 0 : config.n_layer", "LlamaConfig.Windows*")
# layer_types says outright which blocks slide
keys("llama_json.cpp", "    blocks = stated;\n", "", "LlamaConfig.Windows*")
keys("llama_json.cpp", "if (is_mixtral) std::swap(names[0], names[1]);", "",
     "LlamaConfig.OfTwoNames*")
keys("llama_json.cpp", "(i + 1) % step == 0 &&", "i % step == 0 &&",
     "LlamaConfig.SaysWhichBlocks*")
keys("llama_json.cpp", "llama.norm_topk_prob = true;",
     "llama.norm_topk_prob = false;", "LlamaConfig.AnAbsent*")
# transformers 4.57 reads this name alone
keys("llama_json.cpp",
     'object.update({{"num_experts", llama.num_experts},  // 4.57 reads this one\n'
     '                 {"norm', 'object.update({{"norm',
     "LlamaConfig.IsWritten*")
keys("llama_families.cpp", "{\"mistral\", \"Mistral\", 32000, 4096, 14336, 32, 32, 8",
     "{\"mistral\", \"Mistral\", 32000, 4096, 14336, 32, 32, 0",
     "LlamaConfig.AnAbsent*")
# The base inside counts more than the one outside
keys("llama_rope.cpp", 'read_positive(rope, label, "rope_theta", &result.theta);',
     "", "LlamaRope.IsRead*")
keys("llama_rope.cpp", "scaling.original_positions = positions;",
     "scaling.original_positions = 8192;", "LlamaRope.Llama3Without*")
keys("llama_rope.cpp", "!has_factor || (!kind.empty() && kind != \"default\")",
     "true", "LlamaRope.IsRefused*")
keys("llama_rope.cpp", "is_first || are_equal(here, rope)", "true",
     "LlamaRope.IsRefused*")
# Tied tables count once
models("llama_config.cpp", "(llama.tied ? 1 : 2) * config.vocab_size",
       "2 * config.vocab_size", "LlamaConfig.Released*")
models("llama_config.cpp", "window == 0 || seq <= window", "true",
       "LlamaConfig.Sequences*")

# --- Weights -----------------------------------------------------------------------

# Side by side: keys begin behind all queries
keys("llama_files.cpp", "    columns += width;", "    columns = width;",
     "LlamaFiles.*")
# Mixtral's w2 is the last product, w3 the second
keys("llama_files.cpp", 'is_mixtral ? "w3" : "up_proj"',
     'is_mixtral ? "w2" : "up_proj"', "LlamaFiles.*")
# Square matrices have the right shape without a transposition
keys("llama_files.cpp", "overlap.file_row = 1;\n    overlap.file_column = rows;",
     "overlap.file_column = 1;", "LlamaFiles.AreTransposed*")
keys("llama_files.cpp", "overlap.experts = places(shards, whole.shape, 0, piece.expert, 1);",
     "overlap.experts = {{piece.expert, 0}};", "LlamaFiles.APart*")
keys("llama_files.cpp", "runs_of(shards, whole, dim)",
     "runs_of({}, whole, dim)", "LlamaFiles.APart*")
# The gate's width is that of the experts
keys("llama_files.cpp", "f = llama.moe_intermediate_size;",
     "f = llama.intermediate_size;", "LlamaWeights.*")
keys("weight_sources.cpp", "if (file.find(piece.name).dtype != dtype) dtype = "
     "source.target.dtype();", "", "LlamaFiles.TensorsOfTwo*")
keys("weight_sources.cpp", "!is_of_block || is_constant || known.count(name) > 0",
     "true", "LlamaFiles.WeightsThat*")
keys("weight_sources.cpp", "!has(\".safetensors\") || "
     "!has(\".safetensors.index.json\")", "true", "LlamaShards.Beside*")
models("checkpoint.cpp", "if (target.name == tied) check_is_tied",
       "if (false) check_is_tied", "LlamaFiles.AnOutput*")
models("checkpoint.cpp", "{\"rope_theta\", llama.rope_theta},", "",
       "LlamaFiles.TheirConfig*")
