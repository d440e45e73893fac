"""Mutants of kernels that were written for speed (windows of 3x3 by Winograd's
algorithm, gradients of tall weights), of the cuts of chapter 04, of the one
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
zero = chapter("03_zero_fsdp/zero", "engine")
zero("zero_memory.cpp", "has_updates || (trains && is_resumed)", "trains",
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
