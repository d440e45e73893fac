"""Mutants of experts and of hybrids: chapters 13 and 14."""

from mutants import chapter, folder

# --- 13, as chapter 14 uses it -------------------------------------------------

moe = chapter("13_moe", "moe")
routing = chapter("13_moe", "hybrid")
NOISE = "HybridExperts.Noise*"
# Draws are keyed by the place in a rank's part
moe("routing.cpp", "part_.place[at(token % per_row_)]", "token % per_row_",
    "TokenDraws.*")
routing("gate.cpp",
        "call.part.place.empty() ? call.per_row : call.part.whole",
        "call.per_row", NOISE)
moe("gate.cpp", "1 / static_cast<double>(routing.tokens * counted)",
    "1 / static_cast<double>(routing.tokens)", "AuxiliaryLoss.*")
# Losses of gates start from 1, whatever the main loss starts from
moe("moe_layer.cpp", "Tensor::full({}, record->loss_scale, like)",
    "Tensor::full({}, 1, like)", "*MoeForms*")
moe("moe_layer.cpp", "call.capacity_multiple = size_of(groups_.tp)",
    "call.capacity_multiple = 1", "MoeTraining.WithTensor*")
moe("routing.cpp", "std::max(options.min_capacity, slots)", "slots",
    "Capacity.*")
moe("routing.cpp", "priority[at(a)] > priority[at(b)]",
    "priority[at(a)] < priority[at(b)]", "*Top*")
moe("routing.cpp", "slot < routing.capacity ? slot : -1", "slot",
    "*Top*:*MoeForms*")
# The one device does not scale the losses of gates
routing("moe_strategy.cpp", "loss_scale = scale / parts", "loss_scale = 1 / parts",
        "HybridPrecision.TheScale*")

# --- 14: which sums, over which ranks -------------------------------------------

hybrid = chapter("14_hybrid_3d", "hybrid")
TRAPS = "HybridExpertSums.*:HybridExpertTraps.Updates*"
EXPERTS = "HybridExperts.TrainAsOneDevice"
hybrid("update.cpp",
       "moe::is_expert(each.name) ? &groups_.experts : &groups_.data",
       "&groups_.data", TRAPS)
hybrid("update.cpp", "bucket.tied != nullptr) {\n      sum",
       "false) {\n      sum", "HybridReplicas.*")
hybrid("update.cpp", "if (bucket.is_partial) {", "if (false) {",
       "HybridReplicas.*")
# ZeRO-1 shows nobody its new parameters
hybrid("update.cpp",
       'bucket.data->all_gather(bucket.flat, bucket.own, "parameters").wait()',
       "void()", "HybridReplicas.*")
hybrid("update.cpp", "optimizer_->step_one(i++, grad, factor)",
       "optimizer_->step_one(i++, grad, 1.0)", "HybridBuckets.OfAny*")
# Experts of all sizes are summed over tp as if their tokens were cut
hybrid("hybrid_layers.cpp", "!is_whole(name) || moe::is_expert(name)",
       "!is_whole(name)", EXPERTS)
hybrid("hybrid_layers.cpp", 'cuts_slots ? copies + "-tp" : copies',
       'cuts_slots && !has_ep ? copies + "-tp" : copies', TRAPS)
# The all-to-all of other ranks
hybrid("hybrid_layers.cpp", '&mesh.group("ep")', '&mesh.group("edp")', EXPERTS)
hybrid("hybrid_layers.cpp",
       "setup.expert_tp && moe::expert_layout(name, 0, 1, 0, t) ==\n"
       "                                  moe::expert_layout(name, 0, 1, 1, t)",
       "false", "HybridExpertNorm.*")
hybrid("hybrid_layers.cpp",
       "part_of_samples(seq, setup.sequence().layout, cp.rank(), cp.size())",
       "moe::SamplePart()", NOISE)

# --- 14: the norm, each element once ---------------------------------------------

NORM = "HybridNorm.*:HybridExpertNorm.*"
hybrid("update.cpp", "(is_sharded_ || kind.data->rank() == 0)", "true", NORM)
hybrid("update.cpp", "(!kind.is_replicated || groups_.tp.rank() == 0)", "true",
       NORM)
hybrid("update.cpp", "(kind.tied == nullptr || kind.tied->rank() == 0)", "true",
       NORM)
hybrid("hybrid_zero_strategy.cpp",
       "groups_.tp.rank() == 0 ? whole : 0", "whole",
       "HybridExperts.*Zero2")

# --- 14: factors -------------------------------------------------------------------

SHARE = ("scaler_.scale() /\n"
         "      static_cast<double>(setup_.dp * setup_.micro_batches * setup_.cp)")
hybrid("hybrid_strategy.cpp", SHARE,
       "scaler_.scale() /\n"
       "      static_cast<double>(setup_.dp * setup_.micro_batches)",
       "HybridExperts.EachPart*")
hybrid("hybrid_strategy.cpp", SHARE,
       "1.0 / static_cast<double>(setup_.dp * setup_.micro_batches * setup_.cp)",
       "HybridPrecision.TheScale*")
hybrid("hybrid_zero_strategy.cpp",
       "scaler_.scale() / static_cast<double>(setup_.micro_batches)",
       "scaler_.scale()", "HybridExperts.*Zero2")
# Experts divided by the ranks that sum them
hybrid("hybrid_zero_strategy.cpp",
       "scaler_.scale() * groups_.data.size() / zero.group().size()",
       "scaler_.scale()", "HybridExpertTraps.Updates*")
hybrid("hybrid_strategy.cpp",
       "result.was_skipped = !std::isfinite(result.grad_norm);",
       "result.was_skipped = false;", "HybridPrecision.AnOverflow*")
hybrid("hybrid_strategy.cpp", "groups_.tp.rank() == 0 && groups_.cp.rank() == 0",
       "groups_.tp.rank() == 0", "HybridExperts.EachPart*")
hybrid("degrees.cpp", "(dp_rank * setup.micro_batches + b) * rows", "b * rows",
       "HybridDegrees.MicroBatches*")
hybrid("degrees.cpp",
       'topology.coordinate(rank, "edp") * topology.size("ep") +\n'
       '         topology.coordinate(rank, "ep")',
       'topology.coordinate(rank, "ep")', "HybridExperts.MoveWith*")

# --- 14: buckets that leave during backward ------------------------------------

OVERLAP = "FullBuckets.*:HybridOverlap.*"
# Sent by the first micro-batch
common = folder("chapters/common/pipeline", "hybrid")
common("pipeline_engine.cpp", "std::none_of(now + 1, list.end(),",
       "std::none_of(list.begin(), now,", OVERLAP)
# Sent with the first of two gradients of the tied embedding
hybrid("update.cpp", "if (gradients_.is_last_use(parameter)) num",
       "num", OVERLAP)
hybrid("update.cpp", "filled_[a] < filled_[b]", "a < b", OVERLAP)
hybrid("update.cpp", "if (setup.overlap_grad_reduce) kind.stage = stage;", "",
       OVERLAP)
# What is sent is not the gradient that the optimizer reads
hybrid("update.cpp", "each.tensor.set_grad(there[i].target);", "", OVERLAP)

# --- 14: the bill --------------------------------------------------------------------

hybrid("bill.cpp", "(z.blocks + z.blocks_again / 2)",
       "(z.blocks + z.blocks_again)", "HybridExperts.RouteAlike*")
hybrid("bill.cpp", "(has_experts ? 1 : 2)", "2", EXPERTS)
hybrid("hybrid_zero_strategy.cpp",
       "static_cast<double>(zero->num_skipped_steps()) *\n"
       "                  zero->predicted_load_bytes()",
       "0.0", "HybridPrecision.AnOverflow*")

# --- 14: the time of a step ------------------------------------------------------------

TIME = "HybridTextbook.*"
hybrid("hybrid_step_time.cpp", "{q, q + std::max(q, a), q + a, q}",
       "{q, q + q + a, q + a, q}", TIME)
hybrid("hybrid_step_time.cpp",
       "is_first ? std::vector<double>(gathers.size()) : gathers",
       "std::vector<double>(gathers.size())", TIME)
hybrid("hybrid_step_time.cpp", "if (bucket.is_partial) times",
       "if (false) times", TIME)
hybrid("hybrid_step_time.cpp", "replay.flushed[at(pp.rank())]",
       "replay.spans[at(pp.rank())].back().end", TIME)
hybrid("hybrid_step_time.cpp", "if (is_own && !is_behind) return left;",
       "if (is_own) return left;", TIME)
hybrid("hybrid_step_time.cpp", "is_position && at.is_cut()", "false", TIME)
hybrid("hybrid_step_time.cpp", "is_weight ? 0 : at.message()", "0", TIME)
hybrid("hybrid_step_time.cpp", "z.element == 2 ? expert", "false ? expert", TIME)
hybrid("hybrid_step_time.cpp", "2 * textbook::all_gather(setup.ep,",
       "1 * textbook::all_gather(setup.ep,", TIME)
hybrid("bill.cpp", "sums += 4 * static_cast<double>(bucket.own.numel());", "",
       "HybridPrecision.SumsInF32Hold*")
