"""Mutants of kernels that were written for speed (windows of 3x3 by Winograd's
algorithm, gradients of tall weights), of Llama's operations, of the cuts of chapter 04, of the one
device that f16 is compared with, and of Accelerate's loop."""

from mutants import chapter, folder

# --- Winograd's algorithm --------------------------------------------------------

kernels = folder("core/kernels/cpu", "kernels")
WINOGRAD = "Winograd.*"
kernels("winograd.cpp", "patch / cols % rows * 2", "patch / rows % rows * 2",
        WINOGRAD)
# No padding below an image
kernels("winograd.cpp", "y >= 0 && y < patches.h && x >= 0 && x < patches.w",
        "y >= 0 && x >= 0 && x < patches.w", WINOGRAD)
# The last patch of an odd image writes its neighbour's outputs
kernels("winograd.cpp", "if (y >= patches.h || x >= patches.w) continue;",
        "if (y >= patches.h) continue;", WINOGRAD)
kernels("winograd.cpp", "bias == nullptr ? V(0.0f) : load(bias + c)",
        "V(0.0f)", WINOGRAD)
# Channels behind the first block
kernels("winograd.cpp", "return channel / kDepth * patches * kDepth + patch",
        "return patch", WINOGRAD)
kernels("winograd.cpp", "kCols, block != 0,", "kCols, false,", WINOGRAD)
# The gradient of the image turns its windows by half a turn
kernels("winograd.cpp", "lanes[turned_ ? 8 - i : i][l]", "lanes[i][l]",
        WINOGRAD)
kernels("winograd.cpp", "order->in_ == in_ &&\n           order->turned_ == "
        "turned_", "order->in_ == in_", WINOGRAD)
# The last patches of a turn that is not full
kernels("winograd.cpp", "std::min<std::int64_t>(kTileRows, count - p), kDepth,",
        "kTileRows, kDepth,", WINOGRAD)
# A tile of weights that goes on in the next block of channels
kernels("winograd.cpp", "rows = std::min<std::int64_t>(kTileRows, kDepth - c % "
        "kDepth);\n          float*",
        "rows = kTileRows;\n          float*", WINOGRAD)
kernels("winograd.cpp", "!first, at, out", "false, at, out", WINOGRAD)
kernels("winograd.cpp", "from_dy, end - p, p == 0, sums",
        "from_dy, end - p, false, sums", WINOGRAD)
kernels("winograd.cpp", "write_windows(u, in, j + k, c + r, dweight)",
        "write_windows(u, in, j + k, c, dweight)", WINOGRAD)
kernels("winograd.cpp", "are_all_at_once = at_once == patches.count",
        "are_all_at_once = true", WINOGRAD)

# --- Products ----------------------------------------------------------------------

MATMUL = "*Matmul.*"
kernels("matmul_dnnl.cpp", "!(is_tall(args) && args.resume)", "true", MATMUL)
kernels("matmul_dnnl.cpp", "(args.resume ? 4 : 0)", "0", MATMUL)
kernels("matmul_dnnl.cpp", "sgemm(!args.trans_b, false,",
        "sgemm(args.trans_b, false,", MATMUL)

# --- Llama's operations --------------------------------------------------------------

core = folder("core", "core")
llama = folder("core/kernels/cpu", "core")
# One rounding instead of two, in forward and in the weight's gradient
llama("norm.cpp", "rounded<T>(load_up_to(x + i, size) * factor);",
      "load_up_to(x + i, size) * factor;", "RmsNorm.Rounds*")
llama("norm.cpp", "xsimd::fma(g, rounded<T>(xhat),", "xsimd::fma(g, xhat,",
      "RmsNorm.TheWeights*")
llama("norm.cpp", "dot_row(x, x, cols) / static_cast<S>(cols) + eps)",
      "(dot_row(x, x, cols) + eps) / static_cast<S>(cols))", "RmsNorm.*")
llama("norm.cpp", "factor * (g - xhat * slope)", "factor * g", "*/RmsNorm*")
llama("swiglu.cpp", "rounded<T>(g * sigmoid_vec(g));", "g * sigmoid_vec(g);",
      "Swiglu.Rounds*")
llama("swiglu.cpp", "rounded<T>(grad * load_up_to(gate + cols + i, size));",
      "grad * load_up_to(gate + cols + i, size);", "Swiglu.Rounds*")
llama("swiglu.cpp", "grad * rounded<T>(g * s), size);", "grad * (g * s), size);",
      "Swiglu.Rounds*")
llama("swiglu.cpp", "s * xsimd::fma(g, one - s, one);", "s;", "*/Swiglu*")
# Half a turn; the table of another token; v lost
llama("rope.cpp", "store_up_to(y + j, b * c + a * s, size);",
      "store_up_to(y + j, b * c - a * s, size);", "Rope.Equals*")
llama("rope.cpp", "r % args.tokens * dim", "r / args.tokens * dim",
      "Rope.Equals*")
llama("rope.cpp", "in + args.heads * dim, in + width,",
      "in + args.heads * dim, in + args.heads * dim,", "Rope.Equals*")
# A head that is no whole number of vectors
llama("rope.cpp", "i = std::min(from, half - size), j", "i = from, j",
      "Rope.Equals*")
core("ops_rope.cpp", "  args.backward = true;\n", "", "*/Rope*")
# Positions that begin at 0 and follow one another
core("ops_rope.cpp", "static_cast<S>(positions[t])", "static_cast<S>(t)",
     "RopeTable.*")
core("ops_rope.cpp", "wide_table<double> : wide_table<float>;",
     "wide_table<double> : wide_table<double>;", "RopeTable.Computes*")
core("ops_rope.cpp", "  if (turns > high) return frequency;\n", "",
     "RopeFrequencies.Llama3*")
core("ops_rope.cpp", "  if (turns < low) return slow;\n", "",
     "RopeFrequencies.Llama3*")
core("ops_rope.cpp", "(1 - share) * slow + share * frequency",
     "share * slow + (1 - share) * frequency", "RopeFrequencies.Llama3*")
core("ops_rope.cpp", "std::pow(theta, -exponent)", "std::pow(theta, -2 * exponent)",
     "RopeFrequencies.Are*")
# Keys behind as many heads as there are of queries
core("ops_attention.cpp", "i == 0 ? 0 : args.heads + (i - 1) * args.kv_heads;",
     "i * args.heads;", "Attention.PackedGroups*")
core("ops_attention.cpp", "heads + (values > 0 ? 1 : 2) * kv_heads;",
     "heads + 2 * heads;", "Attention.PackedGroups*")

# --- Attention's blocks --------------------------------------------------------------

attention = folder("core/kernels/cpu", "core")
ATTENTION = "Attention.EqualsTheComposed*"
# The second block of keys adds to the first one's gradients
attention("attention_backward.cpp", "dv_ + from * value_ld", "dv_", ATTENTION)
attention("attention_backward.cpp", "dk_ + from * ld", "dk_", ATTENTION)
# Scores take queries times the scale, gradients of keys take them without
attention("attention_backward.cpp",
          "sizes_.dim, scale, scaled_queries_", "sizes_.dim, S(1), scaled_queries_",
          ATTENTION)
attention("attention_backward.cpp", "slopes_, queries_, sizes_",
          "slopes_, scaled_queries_, sizes_", ATTENTION)

# --- Where chapter 04 cuts -----------------------------------------------------------

cut = chapter("04_model_parallel", "pipelines")
cut("model_parallel_strategy.cpp", 'if (settings.partition == "half") return half_of(',
    "if (true) return half_of(", "ModelParallelCut.*")
cut("model_parallel_strategy.cpp", "std::min(settings.split_size, options.batch)",
    "options.batch", "ModelParallelCut.*")
cut("bill.cpp", "[static_cast<std::size_t>(cut)]", "[1]",
    "ModelParallelBill.*")

# --- f16: the one device, and bills of steps that are left out --------------------

engine = chapter("15_engine", "engine")
SKIPS = "EngineStrategies.F16OverflowsWhereARankDoes"
engine("strategies.cpp", "one.averages_replicas = true", "void()", SKIPS)
zero = chapter("03_zero_fsdp", "engine")
zero("bill.cpp", "has_updates || (trains && is_resumed)", "trains",
     SKIPS)
# Experts: a step that is left out on some ranks alone, a norm that counts them
# edp times, losses of gates that are not scaled, values of the wrong rank
moe = chapter("13_moe", "engine")
UNDER = "ExpertsUnderEngine.AnOverflow*"
moe("expert_update.cpp",
    'return std::sqrt(sum_over_ranks(world_, squares, "norm"));',
    "return std::sqrt(squares);", UNDER)
moe("expert_update.cpp", "has_f16_ && !std::isfinite(norm);", "false;", UNDER)
moe("expert_update.cpp",
    "part->group.replicas.rank() == 0 && part->counts(each.name)",
    "part->counts(each.name)", "*ExpertsUnderEngine.Clip*")
moe("moe_strategy.cpp", ".dp = dp, .ep = ep});", ".dp = 1, .ep = 1});",
    "ExpertConfigs.F16*")
moe("bill.cpp", "updates * reduced.update", "steps * reduced.update",
    "ExpertConfigs.F16*")
engine("expert_model.cpp", "each.layer->record().loss_scale = factor;",
       "(void)each;",
       "*ExpertsUnderEngine.Equal*")
engine("expert_model.cpp", "broadcast_coalesced(*replicas_.at(key), tensors",
       "broadcast_coalesced(world_, tensors", "ExpertsUnderEngine.EveryRank*")
engine("expert_model.cpp", "each.shares_slots() ? world_ : dp_", "dp_",
       "ExpertsUnderEngine.TrainAGpt*")
engine("expert_model.cpp", "if (is_cut) groups[0].counts = counts;", "",
       "ExpertsUnderEngine.TrainAGpt*")
hybrid = chapter("14_hybrid_3d", "hybrid")
hybrid("hybrid_strategy.cpp", "one.averages_replicas = setup.zero_stage >= 2;", "",
       "HybridPrecision.OneDevice*")
hybrid("hybrid_strategy.cpp",
       "const DynamicLossScaler scaler = setup.loss_scaler(options.dtype);",
       "const DynamicLossScaler scaler(setup.loss_scale);",
       "HybridPrecision.OneDevice*")

# --- The loop of Accelerate ---------------------------------------------------------

loop = chapter("15_engine", "accelerator")
ORIGINALS = "*AcceleratorOriginals.*"
loop("prepared.cpp", "options.even_batches && ranks > 1",
     "options.even_batches", ORIGINALS)
loop("prepared.cpp", "loop.split_batches ? 1 : ", "", ORIGINALS)
loop("accelerator.cpp", "loop.training->is_at_end();", "false;", ORIGINALS)
loop("accelerator.cpp", "return all.rows_view(0, loader->remainder);",
     "return all;", ORIGINALS)
loop("accelerator.cpp", "std::min(static_cast<std::size_t>(done / round), "
     "loader.batches.size());", "0;", ORIGINALS)
pipeline = folder("chapters/common/pipeline", "accelerator")
pipeline("pipeline_engine.cpp", "  runs_.clear();\n", "",
         "AcceleratorTrap.Evaluating*")
