"""Mutants of the Llama family's config.json and weights."""

from mutants import chapter, folder

# --- The decoder -------------------------------------------------------------------

block = folder("chapters/common/models", "single_device")

block("block.cpp", "return static_cast<double>(in * chosen) / (is_cut ? t : 1);",
      "return static_cast<double>(in * chosen) / t;", "BlockTable.*")
block("block.cpp", "(bias ? static_cast<double>(experts) * wide : 0)",
      "(bias ? static_cast<double>(experts) * wide / t : 0)", "BlockTable.*")
block("block.cpp", "heads) / std::min(t, static_cast<double>(heads));",
      "heads);", "BlockTable.*")
block("block.cpp", "all = (seq + 1) / 2;", "all = seq / 2;", "BlockTable.*")
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
models("llama_config.cpp", "config.llama.tied ? 1 : 2;", "2;",
       "LlamaConfig.Released*")
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

# --- Experts -----------------------------------------------------------------------

# Of equal probabilities the first one is the largest
models("llama_experts.cpp", "of_token[e] > of_token[best]",
       "of_token[e] >= of_token[best]", "LlamaExperts.OfEqual*")
# A token that is chosen twice has one expert fewer
models("llama_experts.cpp", "      is_taken[place_of(best)] = true;\n", "",
       "*LlamaExpertsLayer.*")
# Softmax over all experts, then a division by the sum of the chosen ones
models("llama_experts.cpp", "if (divides_by_sum_) {", "if (true) {",
       "*LlamaExpertsLayer.*")
models("llama_experts.cpp", "if (divides_by_sum_) {", "if (k > 1 && divides_by_sum_) {",
       "*LlamaExpertsLayer.*")
models("llama_experts.cpp", "of_choice[i] += static_cast<std::int64_t>(i) / k * experts;",
       "of_choice[i] += static_cast<std::int64_t>(i) % k * experts;",
       "*LlamaExpertsLayer.*")
# Probabilities of 16 bits would be equal where logits differ
models("llama_experts.cpp", "x.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;",
       "x.dtype();", "LlamaExperts.SoftmaxIs*")
# Nothing is dropped: the busiest expert has room for all
models("llama_experts.cpp", "rows.longest = *std::max_element(counts.begin(), counts.end());",
       "rows.longest = (tokens * k + experts - 1) / experts;",
       "LlamaExperts.AllTokens*")
models("models.cpp", "config.llama.has_experts_in(block_of(config, name))) {",
       "true) {", "LlamaExperts.ConfigSays*")
# A block that is computed again in backward leaves the record as it is
models("llama_experts.cpp", "if (RankContext::current().is_recomputing) return;", "",
       "LlamaExperts.Recomputation*")
# Shares are of the tokens of all layers together
models("llama_experts.cpp", "    all.tokens += one.tokens;\n",
       "    all.tokens = one.tokens;\n", "*LlamaBalancing.LossIs*")
models("llama_experts.cpp", "values.push_back(factor * static_cast<double>(experts) * chosen /\n"
       "                     all.tokens / tokens);",
       "values.push_back(factor * static_cast<double>(experts) * chosen / tokens);",
       "*Llama.*mixtral_aux_loss")
# Its gradient is that of the loss times what backward began with
models("llama_experts.cpp", "add_scalar(in[0], coefficient * balancing_loss(all))",
       "add_scalar(in[0], balancing_loss(all))", "*Llama.Losses*mixtral_aux_loss")
models("llama_experts.cpp", "SB_CHECK(parts == 1, kBalancingLossInParts);", "",
       "LlamaBalancing.LossThat*")
models("llama_experts.cpp", "  softmax_gradient_ = Tensor();\n", "",
       "LlamaBalancing.LossThat*")
models("llama_config.h", "num_experts > 0 && output_router_logits &&",
       "num_experts > 0 &&", "*Llama.Losses*mixtral_top2")
# Experts: all of them are parameters, the chosen ones are computed
models("block.cpp", "    part->experts = l.num_experts;\n", "",
       "LlamaExperts.ConfigSays*")
models("block.cpp", "l.moe_intermediate_size;\n  const double stddev",
       "l.intermediate_size;\n  const double stddev", "LlamaExperts.ConfigSays*")

run = folder("chapters/common/run", "single_device")

run("kept.cpp", "if (!c.llama.has_experts_in(i)) ++dense;", "++dense;",
    "LlamaExperts.Claims*")
run("kept.cpp", "if (config.llama.num_experts > 0) return kNoClaim;", "",
    "LlamaExperts.Claims*")
run("options.cpp", "!config.llama.has_balancing_loss() || o.chapter != chapter",
    "true", "LlamaBalancing.InParts*")
# The time of a step on shapes is that of experts chosen evenly
run("program.cpp", '(routes && given.backend != "sim")', "false",
    "LlamaExperts.Claims*")
chapter("00_single_device", "single_device")(
    "single_device.cpp", "!textbook::has_model_times(options_, loaded_.config)",
    "!textbook::is_chosen(options_)", "LlamaExperts.Claims*")

# --- Chapters that cut it --------------------------------------------------------

GOLDEN = "All/GoldenStrategies.*"
of_ranks = folder("chapters/common", "golden_strategies")
# The traps: two different tables are tied; a balancing loss per rank, averaged
of_ranks("models/models.cpp", "visit.module(names_.output(), *wte);",
         "visit.module(names_.table, *wte);", GOLDEN + "05_gpipe*llama_gqa")
of_ranks("sharded/loss.cpp", "sums.is_meta() ? numbers : sums.to_vector<double>()",
         "numbers", GOLDEN + "02_ddp*aux_loss")
of_ranks("models/llama_experts.cpp", "all.tokens / tokens);",
         "all.tokens / all.tokens);", GOLDEN + "02_ddp*aux_loss")
of_ranks("pipeline/pipeline_bill.cpp", "decoder_names(config).head.empty() &&",
         "", GOLDEN + "05_gpipe*world_size_2*llama_gqa")
moe = folder("chapters/13_moe", "golden_strategies")
moe("dispatch.cpp", "sent_rows += n - send[here] + total - recv[here];",
    "sent_rows += n - send[here];", GOLDEN + "13_moe*top2")
moe("bill.cpp", "part.parameters() / sizes.ep", "part.parameters()",
    GOLDEN + "13_moe*top2")
moe("bill.cpp", "names.head.empty() ? 1 : 2", "1", GOLDEN + "13_moe*top2")
moe("moe_strategy.cpp", "loss_over_ranks(config_, *model_, dp_, setup_.micro_batches,\n                      layers_.loss)",
    "layers_.loss", GOLDEN + "13_moe*aux_loss")
# Keys of a rank's own heads, angles of its own tokens, norms of its own heads
hybrid = folder("chapters/14_hybrid_3d", "golden_strategies")
hybrid("hybrid_layers.cpp", "  made.rope_table = over_cp.rope_table;\n", "",
       GOLDEN + "14_hybrid_3d*cp_2*llama_gqa")
hybrid("hybrid_layers.cpp", "std::any_of(own.begin(), own.end(), is_of)",
       "false", GOLDEN + "14_hybrid_3d*qk_norm")
# A Mixtral's router and experts see other tokens on each rank of tp
hybrid("hybrid_layers.cpp",
       "    parts.insert(parts.end(), block.router.begin(), block.router.end());\n",
       "", GOLDEN + "14_hybrid_3d*tp_2*ep_2*top2")
hybrid("hybrid_layers.cpp", "(setup.has_own_experts || ", "(",
       GOLDEN + "14_hybrid_3d*tp_2*ep_2*top2")
hybrid("bill.cpp", " - 5 * z.expert_blocks", "",
       GOLDEN + "14_hybrid_3d*tp_2*ep_2*top2")
hybrid("bill.cpp", " - 2 * z.expert_blocks_again", "",
       GOLDEN + "14_hybrid_3d*tp_2*ep_2*always*top2")
moe("bill.cpp", "2 * load.sent_rows + load.sent_rows_again",
    "2 * load.sent_rows", GOLDEN + "14_hybrid_3d*blocks*top2")
hybrid("bill.cpp", "  own.llama.kv_heads /= setup->tp;\n", "",
       GOLDEN + "14_hybrid_3d*cp_2*llama_gqa")
hybrid("bill.cpp", "z.queries() / z.t() *\n            (1 + 2 * (z.key_share() - keys))",
       "z.h() / z.t()", GOLDEN + "14_hybrid_3d*ulysses*qk_norm")
hybrid("hybrid_step_time.cpp", "is_of_heads && part.name.empty()", "false",
       GOLDEN + "14_hybrid_3d*overlap*qk_norm")
dtensor = folder("chapters/11_dtensor", "golden_strategies")
dtensor("dtensor_layout.cpp",
        "return {cut_columns(dim, index, t, part.columns)};",
        "return {{dim, index, t}};", GOLDEN + "11_dtensor*mesh_2x2*llama_gqa")
dtensor("dtensor_strategy.cpp",
        "lend_parameters(module, tp, replicate());", "",
        GOLDEN + "11_dtensor*mesh_2x2_qwen3_qk_norm")
dtensor("bill.cpp", "all.push_back({norm.parameters(), layers});", "",
        GOLDEN + "11_dtensor*mesh_2x2_qwen3_qk_norm")
dtensor("bill.cpp",
        "uses_table_twice(config()) ? travels(vocabulary_here()) * s.h : 0",
        "travels(vocabulary_here()) * s.h",
        GOLDEN + "11_dtensor*mesh_2x2*llama_gqa")
# --sequence-parallel: gradients of norms are terms of a sum, as that of the head's
# input is; norms' tokens and the loss on cut logits in the bill
SEQUENCE = GOLDEN + "11_dtensor*sequence_parallel*llama_gqa"
dtensor("dtensor_strategy.cpp",
        "if (is_cut) add_layout_hooks(module, tp, sequence(), 0, 0);", "",
        SEQUENCE)
dtensor("dtensor_strategy.cpp",
        ".to_local({partial()});\n    }\n    const Tensor rows",
        ".to_local();\n    }\n    const Tensor rows", SEQUENCE)
dtensor("dtensor_strategy.cpp", "is_cut ? shard(2) : replicate();",
        "replicate();", SEQUENCE)
dtensor("bill.cpp", "summed += 3 * tokens * s.stat;", "", SEQUENCE)
dtensor("bill.cpp", "kept -= (tokens - tokens / t_) *", "kept -= 0 *", SEQUENCE)
plan = folder("chapters/11_dtensor", "dtensor")
# One cut of [gate | up]; heads of keys; the gradient of a norm over heads
plan("parallelize.cpp",
     "plan.front().second.columns = mlp->block().up.columns;", "",
     "DTensorBlock.*")
plan("parallelize.cpp", "share(attention->kv_heads, \" heads of keys\");", "",
     "DTensorBlock.*")
plan("parallelize.cpp", "plan.emplace_back(join(name, norm.leaf()), sequence());",
     "", "DTensorBlock.*")
# --- The planner -------------------------------------------------------------------

plans = folder("chapters/planner", "planner")

# A table of the head's own counts, in the states and in the bound
plans("plan.cpp", "base.is_tied = decoder_names(config).head.empty();",
      "base.is_tied = true;", "PlannerLlama.Counts*")
plans("plan.cpp", "const int tables = has_two ? 2 :",
      "const int tables = has_two ? 1 :", "PlannerLlama.Counts*")
# Queries share heads of keys, over cp too
plans("llama_block.cpp", "options.kv_heads = at.sizes.key_heads() / at.tp.size();",
      "", "LlamaBlock.*:RandomPlans.*")
# Models that are only planned: the same weights, or a refusal
plans("stand_in.cpp", "blocks * experts);", "blocks);", "PlannerStandIn.HasThe*")
plans("stand_in.cpp", "kPiece * std::round(width / kPiece)", "width",
      "PlannerStandIn.HasThe*")
plans("stand_in.cpp", "std::max(std::abs(parameters), std::abs(operations))",
      "std::abs(parameters)", "PlannerStandIn.IsRefused*")
plans("stand_in.cpp", "row.part.window < seq", "row.part.window > seq",
      "PlannerStandIn.Windows*")
plans("stand_in.cpp", "if (window == 0 || seq <= window)", "if (true)",
      "PlannerStandIn.Windows*")
plans("plan_report.cpp", "if (result.best.empty() || !request.trains())",
      "if (result.best.empty())", "PlannerStandIn.NoCommand*")
# Parts of a plan that is explained
plans("step_memory.cpp", "keep(-1, -run.kept_bytes);\n        consider(is_initial",
      "consider(is_initial", "RandomPlans.*:PlannerExplain.*")
plans("step_memory.cpp", "parameters * bytes / sum", "parameters * bytes",
      "PlannerExplain.*")
plans("explain.cpp", "return a.more() < b.more();", "return a.here < b.here;",
      "PlannerExplain.TheNext*")
# No work goes back behind a last gradient of weights
plans("pipeline_time.cpp", "(job.is_zero_bubble ? 0 : first.backward.device_s)",
      "first.backward.device_s", "*PlannerBounds.*")

# Experts: those of a rank of ep, with the ranks that have the same ones
plans("step_memory.cpp", "zero::model_states(zero_stage, experts, copies, bytes)",
      "zero::model_states(zero_stage, experts, replicas(), bytes)",
      "PlannerLlama.CountsExperts*")
plans("step_parts.cpp", "part.in * part.out * part.chosen",
      "part.in * part.out", "PlannerLlama.CountsExperts*")
plans("on_shapes.cpp", "if (setup.has_own_experts) setup.ep = layout.ep;", "",
      "RandomPlans.*")
plans("plan.cpp", "static_cast<double>(part.experts) / job.layout.ep",
      "static_cast<double>(part.experts)", "All/PlannerBounds*")

# Activations bound memory; a schedule is judged once, a long one not made
plans("plan.cpp", "of_first.total() + kept", "of_first.total() + 2 * kept",
      "All/PlannerBounds*:PlannerSearch*")
plans("search.cpp", "{setup.schedule, setup.pp, setup.chunks, setup.micro_batches}",
      "{setup.schedule, setup.pp, 0, 0}", "Planner*")

# --- What trains --------------------------------------------------------------------

software = folder("sim", "sim")
plans("pipeline_time.cpp", "if (job_.waits_for_messages) to.device_s += messages_[rank];",
      "", "HybridStep.MayWait*")
plans("pipeline_time.cpp", "rank.host_s += each.host_s;", "", "RandomPlans.*")
plans("pipeline_time.cpp",
      "ranks_[rank].host_s = ranks_[rank].device_s;  // it reads the loss", "",
      "RandomPlans.*")
plans("pipeline_time.cpp", "b == 0 ? times.first_backward_input",
      "b < 0 ? times.first_backward_input", "RandomPlans.*")
plans("pipeline_time.cpp", "rings / all", "0 * rings / all", "RandomPlans.*")
plans("step.cpp", "sums_apart = job.layout.ep > 1 || job.layout.tp > 1;",
      "sums_apart = true;", "RandomPlans.*")
plans("step.cpp", ": kernel(\"copy\", 2 * bytes)", ": 0.0", "RandomPlans.*")
plans("stage.cpp", "choices % experts != 0", "choices % experts < 0",
      "PlannerPrediction.TheSlowest*")
plans("step.cpp", "StageParts parts = stages[i];",
      "StageParts parts = {stages[i].blocks};", "PlannedAlone.BoundsCount*")
plans("step.cpp", "step.gradients_s = std::max(0.0, step.gradients_s);", "",
      "PlannerPrediction.NoPart*")
plans("plan.cpp", "request.cluster_source();", "request.base.cluster.name;",
      "PlannerPrediction.AClusterFile*")
plans("step_parts.cpp", "if (place == 0) return cluster;", "return cluster;",
      "RandomPlans.*")
plans("zero_run.cpp", "times * (of_more - of_few)", "(of_more - of_few)",
      "RandomPlans.*")
plans("composed_stage.cpp", "blocks * (*more[i] - *few[i])",
      "(*more[i] - *few[i])", "RandomPlans.*")
plans("step.cpp", "job.offloads && job.is_of_chapter()", "false",
      "PlannerSearch.AnOffload*")
plans("llama_block.cpp", "index % 2 == 0)) {", "index % 2 == 2)) {", "LlamaBlock*")
software("cluster.cpp", "cluster.software = Software();", "", "ClusterPresets*")
software("cluster.cpp", "internal::apply_software(cluster);", "", "ClusterPresets*")
software("internal/cluster_reader.cpp", "if (name != cluster.device.name) continue;",
         "", "ClusterPresets*")
software("cost_model.cpp", "return is_backward ? 68.0 / 6 : 34.0 / 4;", "return 1;",
         "CostModel.*")
# --- Rings that fold ---------------------------------------------------------------

of_hybrid = folder("chapters/14_hybrid_3d", "hybrid")
of_hybrid("hybrid_strategy.cpp", 'runs["cp"] = setup.cp - 1;', 'runs["cp"] = 0;',
          "HybridFolding.*")
of_rings = folder("chapters/12_sequence_parallel", "hybrid")
of_rings("ring_exchange.cpp", "return num_inside == 0 || num_inside == num_hops;",
         "return true;", "HybridFolding.*")
of_sim = folder("sim", "sim")
of_sim("timed_group.cpp", "to_itself_[call.tag].push_back(facts);", "",
       "TimedGroup.*")
of_sim("world.cpp", "if (folds && number == r) result.running[at] = r;", "",
       "TimedGroup.*")
