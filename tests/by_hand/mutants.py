"""The changes that mutation.py makes: one line each, and the tests to notice it.

`line` is text of `file`, once in it; `becomes` takes its place. `tests` are
filters of GoogleTest for `program` (without its ending, _test), narrow enough
to run for seconds, the likeliest first. `reason` is for those that no test can
notice.
"""

import typing


class Mutant(typing.NamedTuple):
    file: str
    line: str
    becomes: str
    program: str
    tests: str
    reason: str = ""


MUTANTS = []


def folder(path, program):
    """A function that adds mutants of files of one folder."""
    def add(file, line, becomes, tests, reason=""):
        MUTANTS.append(Mutant(f"{path}/{file}", line, becomes, program, tests,
                              reason))
    return add


def chapter(name, program):
    return folder(f"chapters/{name}", program)


# --- Data parallelism in one process -----------------------------------------

data_parallel = chapter("01_data_parallel", "data_parallel")

# Another sum of gradients: without the second device's
data_parallel(
    "replicate.cpp",
    "for (std::size_t d = 1; d < devices.size(); ++d) {\n      const Tensor",
    "for (std::size_t d = 2; d < devices.size(); ++d) {\n      const Tensor",
    "*DataParallelParity.Gradients*")
data_parallel(
    "replicate.cpp", "if (mine.bytes < limit_bytes) continue;",
    "if (mine.bytes <= limit_bytes) continue;", "DataParallelChunks.*")
data_parallel(
    "replicate.cpp", "(parameter.requires_grad() ? trained : fixed)",
    "(parameter.requires_grad() ? fixed : fixed)",
    "DataParallelReplicate.*:*DataParallelParity.Gradients*")
data_parallel(
    "replicate.cpp", "copy.numel * static_cast<std::int64_t>(devices.size() - 1)",
    "copy.numel * static_cast<std::int64_t>(devices.size())",
    "*DataParallelParity.Bytes*:DataParallelBill.*")
# Replicas that die before their backward
data_parallel(
    "data_parallel.cpp",
    "outputs[i] = holding(forward(*replicas[i], inputs[i]), replicas[i]);",
    "outputs[i] = forward(*replicas[i], inputs[i]);",
    "DataParallelReplicate.*")
data_parallel(
    "data_parallel.cpp", "rows.first += rows.stride * inputs[i].size(0);", "",
    "*DataParallelParity.Dropout*")
data_parallel(
    "scatter_gather.cpp", "copy.sent[op == CommOp::kScatter ? r : i]",
    "copy.sent[r]", "*DataParallelParity.Bytes*:DataParallelBill.*")

# --- Distributed data parallelism ---------------------------------------------

ddp = chapter("02_ddp", "data_parallel")

ddp("ddp.cpp", "!will_reduce() || !parameter.tensor.requires_grad()", "true",
    "DdpTrap.AParameterTrained*")
ddp("reducer.cpp", "const double factor = comm_hook_ ? 1 : 1 / divisor_;",
    "const double factor = 1;", "DdpModel.*:DdpNoSync.*")
# The small first bucket: when buckets are made, and when they are rebuilt
ddp("reducer.cpp", "limits_of(options)));", "{}));", "DdpBuckets.*")
ddp("reducer.cpp", "limits_of(options_)));", "{}));", "DdpBuckets.*")
ddp("reducer.cpp", "if (!has_rebuilt_) slot.arrival = ++num_arrived_;", "",
    "DdpOrder.*:DdpBuckets.*")
ddp("reducer.cpp", "while (next_bucket_ < buckets_.size() &&",
    "if (next_bucket_ < buckets_.size() &&", "DdpOrder.*:DdpLedger.*")
ddp("reducer.cpp",
    "if (!usage_.has_users(slot.index)) return;", "",
    "DdpUnused.*")
ddp("reducer.cpp", "usage_.mark_used(slot.index);", "", "DdpUnused.*")
ddp("unused_parameters.h", "return --missing_uses_[parameter] <= 0;",
    "return --missing_uses_[parameter] < 0;", "DdpUnused.*:DdpTrap.*")
ddp("reducer.cpp", "SB_CHECK(is_expecting_, \"ddp: rank \"",
    "SB_CHECK(true, \"ddp: rank \"", "DdpTrap.*:DdpForwards.*")
ddp("ddp.cpp",
    "if (RankContext::current().grad_enabled) reducer_->rebuild_buckets();",
    "reducer_->rebuild_buckets();", "DdpOrder.*")
ddp("ddp.cpp",
    "return is_syncing_ && RankContext::current().grad_enabled;",
    "return RankContext::current().grad_enabled;", "DdpNoSync.*")
ddp("ddp.cpp", "if (last_forward_synced_) {", "{", "DdpBuffers.*")
ddp("ddp.cpp",
    "broadcast_coalesced(group, module.parameters(), 0, \"parameters\");", "",
    "*DdpParity.EqualsTheChunks*/1:DdpLedger.*")
ddp("join.cpp", "return divides_by_initial_world_size_ ?",
    "return false ?", "DdpJoin.*")
ddp("join.cpp", "if (num_reducing > 0) reducer_", "reducer_", "DdpJoin.*")
# Statistics on the group of the gradients
ddp("sync_batch_norm.cpp",
    "norm->sum_over_ranks = [own](const Tensor& sums) {\n      own->all_reduce",
    "norm->sum_over_ranks = [own, &group](const Tensor& sums) {\n"
    "      group.all_reduce", "DdpSyncBatchNorm.*")
ddp("bucket.cpp",
    "if (bucket->bytes >=\n        (bucket->has_closed_one",
    "if (bucket->bytes >\n        (bucket->has_closed_one",
    "DdpBuckets.*")
ddp("sampler.cpp",
    "const std::int64_t position = (rank_ + i * num_ranks_) % num_samples_;",
    "const std::int64_t position = (rank_ * size_ + i) % num_samples_;",
    "DdpSampler.*")

# --- ZeRO and FSDP --------------------------------------------------------------

sharded = chapter("03_zero_fsdp", "zero_fsdp")

sharded("zero/zero.cpp", "factor *= clip_factor(norm, options_.clip);",
        "factor *= options_.clip / (norm + 1e-6);", "ZeroOptions.*")
sharded("zero/zero.cpp", "group.shard.dtype() == DType::kF16;",
        "dtype_bytes(group.shard.dtype()) == 2;", "ZeroOptions.*")
sharded("zero/zero.cpp",
        "sum_over_ranks(group_, sum_of_squares(), \"norm\")) /\n           loss_scale_;",
        "sum_over_ranks(group_, sum_of_squares(), \"norm\"));", "ZeroOptions.*")
sharded("zero/zero.cpp", "part.shard_begin != end", "part.shard_begin < end",
        "ZeroOptions.Neighbours*")
sharded("zero/zero12.cpp", "options_.round_robin_gradients);", "false);",
        "ZeroOptions.*")
sharded("zero/zero12.cpp", "options_.alignment, options_.round_robin_gradients);",
        "2, options_.round_robin_gradients);", "ZeroOptions.*")
sharded("zero/zero.cpp",
        "finish_bringing_back();\n    publish(/*with_frozen=*/true);",
        "finish_bringing_back();\n    publish(/*with_frozen=*/false);",
        "ZeroOptions.*")
sharded("zero/zero.cpp", "SB_CHECK(!parameter.tensor.requires_grad(), \"zero: '\"",
        "SB_CHECK(true, \"zero: '\"", "ZeroTrap.AParameter*")
sharded("zero/zero.cpp", "!entry.tensor.requires_grad()) frozen_",
        "entry.tensor.requires_grad()) frozen_", "ZeroTrap.AParameter*")
sharded("fsdp/flat_parameter.cpp", "requires_grad_[i] || !leaves_[i].requires_grad()",
        "true", "FsdpTrap.AParameter*")
# Stage 3's whole parameters stay flat
sharded("zero/zero.cpp", "Tensor::empty(each.tensor.shape(),",
        "Tensor::empty({each.tensor.numel()},", "ZeroState.RankZero*")
# A unit is kept where its next use is exactly as far as the limit
sharded("zero/fetches.cpp",
        "reuse_distance(unit) < options_.max_reuse_distance;",
        "reuse_distance(unit) <= options_.max_reuse_distance;",
        "ZeroReuse.*")
sharded("zero/fetches.cpp",
        "if (live_ >= options_.max_live_parameters) return;", "",
        "ZeroReuse.*")
sharded("zero/zero_offload.cpp", ": traffic.to_device) += source.bytes();",
        ": traffic.to_device) += 4 * source.numel();", "ZeroOptions.*")
sharded("zero/zero12.cpp", "const double share = 1.0 / divisor_before();",
        "const double share = 1.0;", "ZeroTrap.*")
sharded("zero/zero12.cpp",
        "bucket.buffer.flat_view(piece.bucket_begin, {piece.numel}).zero();",
        "", "ZeroTrap.*")
sharded("zero/zero12.cpp",
        "take_runs(runs, num_accumulated_ > 0, host_traffic_);",
        "take_runs(runs, false, host_traffic_);",
        "*ZeroParity.Accumulation*/1")
sharded("zero/zero12.cpp",
        "if (options_.stage == 2) entry.parameter.clear_grad();", "",
        "*ZeroParity.Accumulation*/1")
sharded("zero/zero_buckets.cpp",
        "if (buckets.empty() || filled + numel > bucket_size) {",
        "if (buckets.empty() || filled + numel >= bucket_size) {",
        "ZeroBuckets.*")
sharded("shard_layout.cpp",
        "const std::int64_t multiple = alignment * ranks;",
        "const std::int64_t multiple = ranks;", "ZeroLayout.*")
sharded("zero/zero3_runtime.cpp", "const double share = 1.0 / group_.size();",
        "const double share = 1.0;", "ZeroTrap.*")
sharded("zero/fetches.cpp",
        "if (ahead >= options_.prefetch_bucket_size) return;", "",
        "ZeroOverlap.*")
sharded("zero/zero3_runtime.cpp",
        "places.flat_view(rank * stride + real, {slice - real}).zero();", "",
        "ZeroTrap.*")
sharded("fsdp/fsdp.cpp",
        "const double factor = clip_factor(norm, max_norm);",
        "const double factor = max_norm / (norm + 1e-6);",
        "*FsdpParity.Clips*/1")
sharded("fsdp/fsdp.cpp",
        "sum_over_ranks(*groups_.shards, local, \"norm\");", "local;",
        "*FsdpParity.Clips*/1")
sharded("fsdp/fsdp.cpp",
        "while (num_ranks % factor == 0 && num_ranks / factor > factor)",
        "while (num_ranks % factor == 0 && num_ranks / factor >= factor)",
        "FsdpDivision.*")
sharded("fsdp/fsdp.cpp", "options_.limit_all_gathers && freed_.size() >= 2",
        "options_.limit_all_gathers && freed_.size() >= 3", "FsdpStreams.*")
sharded("fsdp/fsdp.cpp", "return unit.is_root ? !context.grad_enabled : options_.gathers_again();",
        "return options_.gathers_again();", "FsdpGathers.*")
sharded("fsdp/fsdp.cpp", "unit.awaited -= 1;\n  if (unit.calls > 0) return;",
        "unit.awaited -= 1;", "FsdpUses.*")
sharded("fsdp/fsdp_units.cpp",
        "if (options.sync_module_states) broadcast_states();", "",
        "FsdpOptions.*")
# Nodes of every other rank
sharded("fsdp/fsdp_units.cpp",
        "nodes[static_cast<std::size_t>(rank / f)].push_back(rank);\n"
        "    peers[static_cast<std::size_t>(rank % f)].push_back(rank);",
        "nodes[static_cast<std::size_t>(rank % (d / f))].push_back(rank);\n"
        "    peers[static_cast<std::size_t>(rank / (d / f))].push_back(rank);",
        "FsdpHybrid.*")
sharded("fsdp/flat_parameter.cpp", "if (groups_.replicas != nullptr) {",
        "if (groups_.replicas != nullptr && reduce_dtype_ != DType::kBF16) {",
        "FsdpHybrid.*")
sharded("fsdp/flat_parameter.cpp",
        "grads_.flat_view(end, {grads_.numel() - end}).zero();", "",
        "FsdpPadding.*")
sharded("fsdp/flat_parameter.cpp",
        "host_traffic_.to_host += output.bytes();",
        "host_traffic_.to_host += 4 * output.numel();",
        "FsdpOffload.*")
sharded("fsdp/flat_parameter.cpp",
        "options.mixed_precision.reduce_dtype.value_or(compute_dtype_);",
        "options.mixed_precision.reduce_dtype.value_or(dtype_);",
        "FsdpMixedPrecision.*")

# --- What all chapters share ------------------------------------------------------

common = chapter("common", "single_device")
of_replicas = chapter("common", "data_parallel")

common("run/training.cpp",
       "mean_loss += add(piece, share * loss_scale) * share;",
       "mean_loss += add(piece, share * loss_scale);", "*SingleDevicePieces.MicroBatches*")
common("run/training.cpp", "commit_batch_norms(model);", "",
       "ResNet.PiecesCommit*")
common("run/micro_batches.cpp", "{BatchSlice{i, n}, (batch - i + n - 1) / n}",
       "{BatchSlice{i, n}, batch / n}", "*SingleDevicePieces.MicroBatches*")
of_replicas("run/training.cpp",
       "const double share = 1 / static_cast<double>(g);",
       "const double share = 1;", "*DdpParity.ATiedGpt*/1")
of_replicas("run/training.cpp",
       "options.batch / (d * g));\n    random.batch = batch.slice;",
       "options.batch / (d * g));", "*DdpParity.ATiedGpt*/1")
of_replicas("models/data.cpp", "(step * global_batch + slice.first + row * slice.stride) %",
       "(step * global_batch + slice.first + row) %",
       "*DdpParity.ATiedGpt*/1")
common("models/data.cpp", "target[at++] = token[i + 1];",
       "target[at++] = token[i];", "DatasetFiles.*")
common("run/kept.cpp", "elements += part.kept(z.t);",
       "elements += part.deferred(1) / 2;", "*SingleDevicePieces.MemoryHeld*")

comm = folder("comm", "data_parallel")

comm("coalesce.cpp", "bytes_of(pieces.back()) + tensor.bytes() <= max_bytes",
     "bytes_of(pieces.back()) <= max_bytes", "DdpCoalesce.*")

claims = chapter("common", "claims")

claims("run/parity.cpp", "    parity.finite = false;\n", "", "Parity.N*")
claims("run/parity.cpp", "parity.one_device_finite && std::isfinite(theirs)",
       "parity.one_device_finite", "Parity.N*")
claims("run/parity.cpp",
       "parity.passed = parity.finite && parity.max_rel <= parity.tolerance;",
       "parity.passed = parity.finite;", "*WrongRuns.AGradientDivided*/0")

shared_by_pipelines = chapter("common", "pipelines")

of_pipelines = chapter("common", "pipeline_shapes")

of_pipelines("pipeline/pipeline_bill.cpp", "gradients.erase(next);", "",
             "*MemoryRanks*")
of_pipelines("pipeline/pipeline_bill.cpp", "sets[here] = layers_bytes(b, stage, deferred);",
             "sets[here] = 0;", "*MemoryRanks*")
of_pipelines("pipeline/pipeline_bill.cpp",
             "bill[MemoryKind::kParameter] *= max_versions(schedule)[at(rank)];",
             "", "*MemoryRanks.WithoutStash*")
of_pipelines("pipeline/pipeline_bill.cpp", "if (has_forward || !had_one) length",
             "length", "TextbookPipelineBills.Steps*")
of_pipelines("pipeline/pipeline_bill.cpp",
             "(is_on_two ? textbook::all_reduce(2, table) : 0)", "0",
             "TextbookPipelineBills.*")
of_pipelines("pipeline/pipeline_bill.cpp",
             "for (const auto& [name, route] : skips_) {",
             "for (const auto& [name, route] : decltype(skips_)()) {",
             "TextbookPipelineBills.GpipesSkips*")
of_pipelines("pipeline/replay.cpp", "free = std::max(free, end) + each.seconds;",
             "free = end + each.seconds;", "*TextbookPipelines.Messages*")
of_pipelines("pipeline/replay.cpp",
             "(options_.early_recompute ? begin : length) += own.forward;",
             "length += own.forward;", "*TextbookPipelines.Gpipe*")
of_pipelines("pipeline/replay.cpp", "if (to == rank) continue;", "",
             "*TextbookPipelines.Interleaving*")
shared_by_pipelines(
    "pipeline/partition.cpp",
    "const double cost = std::max(worst[s - 1][cut], here);",
    "const double cost = worst[s - 1][cut] + here;", "Stages.*")
shared_by_pipelines(
    "run/micro_batches.cpp", "const std::int64_t size = (batch + n - 1) / n;",
    "const std::int64_t size = batch / n;", "GpipePieces.*")
# A graph that keeps what was only there to be sent
shared_by_pipelines(
    "pipeline/stages.cpp",
    "[grads = run.grad_outputs](const Tensors&) { return std::move(*grads); });",
    "[grads = run.grad_outputs, kept = run.outputs](const Tensors&) {\n"
    "        return std::move(*grads); });",
    "GpipeBill.*")
shared_by_pipelines(
    "pipeline/pipeline_model.cpp", "if (*holders[name].begin() == world.rank())",
    "if (holders[name].count(world.rank()) > 0)",
    "*GpipeTraining*")

# --- Model parallelism --------------------------------------------------------------

model_parallel = chapter("04_model_parallel", "pipelines")

model_parallel(
    "split_sweep.cpp", "time.sd_s = n > 1 ? std::sqrt(squares / (n - 1)) : 0;",
    "time.sd_s = 0;", "ModelParallel*Sweep*")
model_parallel(
    "split_sweep.cpp", "const auto begin = seconds.begin() + 1;",
    "const auto begin = seconds.begin();", "ModelParallel*Sweep*")
model_parallel(
    "split_sweep.cpp", "? a.mean_s < b.mean_s", "? a.mean_s > b.mean_s",
    "ModelParallel*Sweep*")
model_parallel(
    "model_parallel.cpp",
    "splits.emplace_back(begin, std::min(rows, begin + split_size));",
    "splits.emplace_back(begin, begin + split_size);", "ModelParallelSplits.*")
model_parallel(
    "model_parallel.cpp",
    "for (std::size_t i = 0; i < config.depths.size() / 2; ++i) {",
    "for (std::size_t i = 0; i <= config.depths.size() / 2; ++i) {",
    "ModelParallelCut.*")
model_parallel(
    "model_parallel.cpp", "return (n + 1) / (2 * n);", "return n / (2 * n);",
    "ModelParallelTime.*:ModelParallelSplits.*")
model_parallel(
    "bill.cpp", "return {boundary + label_bytes(options), boundary};",
    "return {boundary, boundary};", "ModelParallelBill.*:*ModelParallelParity*")

# --- What is held, and closed forms of a step ---------------------------------------

step_of = {name: chapter(name, "claims")
           for name in ("00_single_device", "01_data_parallel", "02_ddp",
                        "03_zero_fsdp", "04_model_parallel")}
step_of["00_single_device"](
    "single_device.cpp", "return whole.forward() + whole.backward();",
    "return whole.forward() + 2 * whole.forward();",
    "TextbookOfOne.*")
data_parallel(
    "bill.cpp", "if (i == 0) {\n      if (is_known) {",
    "if (i == 1) {\n      if (is_known) {",
    "*DataParallelParity.MemoryHeld*")
step_of["01_data_parallel"](
    "bill.cpp", "(n - 1) * messages", "n * messages", "*Textbook.DataParallel*")
step_of["02_ddp"](
    "bill.cpp", "after += gpt.product(part.backward_operations(gpt.seq));",
    "after += gpt.product(part.operations(gpt.seq));", "*Textbook.Ddp*")
step_of["02_ddp"](
    "bill.cpp", "options.steps == 2 && !finds_unused(ddp.options())", "false",
    "TextbookDdp.*")
step_of["03_zero_fsdp"](
    "bill.cpp", "model.layer_backward, before + next)",
    "model.layer_backward, std::max(before, next))", "*TextbookSharded.*")
step_of["03_zero_fsdp"](
    "bill.cpp", "(options_.stage == 1 ? 1 : micro) * reduce",
    "reduce", "*TextbookSharded.*")
sharded("bill.cpp", ": stage == 1   ? whole * bytes.gradient",
        ": stage <= 2   ? whole * bytes.gradient", "ZeroFsdpBill.Few*")
step_of["04_model_parallel"](
    "bill.cpp", "std::max(first.backward, second.backward + copy)",
    "(std::max(first.backward, second.backward) + copy)", "TextbookOfTwo.*")
step_of["04_model_parallel"](
    "bill.cpp", "if (config.bottleneck && halvings > 0", "if (halvings > 0",
    "TextbookOfTwo.*")

# --- GPipe ------------------------------------------------------------------------------

gpipe = chapter("05_gpipe", "pipelines")

gpipe("gpipe_strategy.cpp", "loss += engine_->loss(b);", "loss = engine_->loss(b);",
      "GpipeParity.*")
gpipe("gpipe.cpp",
      "for (int b = num_micro_batches; b-- > 0;) list.push_back(backward(b));",
      "for (int b = 0; b < num_micro_batches; ++b) list.push_back(backward(b));",
      "Figures.*:Schedules.*")
gpipe("gpipe.cpp", "return static_cast<double>(num_stages - 1) /",
      "return static_cast<double>(num_stages) /", "GpipeSchedule.*")

# --- 1F1B and its kin --------------------------------------------------------------------

kin = chapter("06_1f1b", "pipelines")
pipeline = folder("chapters/common/pipeline", "pipelines")

# An update that waits for nobody
pipeline("dependencies.cpp",
    "for (const Place& each : owners_[at(stage(rank, a.chunk))]) {",
    "for (const Place& each : std::vector<Place>{}) {",
    "Check.*:PipeDream.*:Replays.*:Asynchronous*")
pipeline("pipeline_engine.cpp", "commit_batch_norms(model_.stage(stage));", "",
         "GpipeBatchNorm.*")
pipeline("pipeline_engine.cpp", "outputs = std::exchange(live.run.outputs, {});",
         "outputs = live.run.outputs;",
         "EngineWorlds.SchedulesCount*")
pipeline("pipeline_engine.cpp", "live.inputs.clear();\n  live.run.outputs.clear();",
         "live.inputs.clear();", "GpipeBill.RecomputedOutputs*")
pipeline("pipeline_engine.cpp", "if (versions_ != nullptr) versions_->before_recompute(b);",
         "", "RecomputeWorlds.*")
pipeline("pipeline_engine.cpp", "return loss.read * loss.share;",
         "return loss.read / schedule_.num_micro_batches;", "GpipeParity.*")
pipeline("schedule.cpp", "backward_is_next_.count({micro_batch, chunk}) == 0;",
         "true;", "Recomputed.*")
pipeline("pipeline_engine.cpp", "random.next_op = spec(b, stage).first_random_op;", "",
         "EngineTest.*")
pipeline("pipeline_engine.cpp", "later.flush();", "", "ZeroBubbleTest.*")
pipeline("pipeline_bill.cpp", "if (stage > 0 && !is_here(b, stage - 1)) {",
         "if (stage > 0) {", "*EngineRanks*")
kin("schedules.cpp", "std::min(p - 1 - stage, m)", "std::min(p - stage, m)",
    "Schedules.*:Figures.*")
kin("schedules.cpp", "std::min(2 * (p - rank - 1) + (v - 1) * p, m * v)",
    "std::min((p - rank - 1) + (v - 1) * p, m * v)", "Schedules.*")
kin("schedules.cpp", "if (b >= delay) list", "if (b > delay) list",
    "Schedules.*:Figures.*")
kin("schedules.cpp", "split_backward(2 * (num_ranks - stage) - 1, 2 * stage,",
    "split_backward(2 * (num_ranks - stage), 2 * stage,",
    "Schedules.*:*ClosedForms*")
kin("weight_stash.cpp",
    "use.backward = stashes_ ? use.forward : use.newest;",
    "use.backward = use.newest;", "*Asynchronous*")
kin("weight_stash.cpp", "scale_in_place(each.grad(), 1.0 / replicas_);", "",
    "AsynchronousTest.*")
kin("weight_stash.cpp", "while (oldest_ < oldest_needed && size() > 1) {",
    "while (oldest_ + 1 < oldest_needed && size() > 1) {", "*Asynchronous*")
kin("post_validation.cpp", "verdict.skips = !std::isfinite(squared_norm);",
    "verdict.skips = false;", "*PostValidation*")
kin("post_validation.cpp",
    "clip_factor(std::sqrt(squared_norm), clip);",
    "clip / (std::sqrt(squared_norm) + 1e-6);", "*PostValidation*")
kin("post_validation.cpp", "if (is_amended && has_stepped_) roll_back();", "",
    "*PostValidation*")
kin("post_validation.cpp", "optimizer_.set_lr(lr_);", "", "*PostValidation*")
pipeline("schedule_check.cpp",
    "if (a.kind != ActionKind::kForward || !is_backward(b)) {",
    "if (!is_backward(b)) {", "Check.*")
pipeline("schedule_check.cpp",
    "per_step >= 1 && s.num_micro_batches % per_step == 0,",
    "per_step >= 1,", "Check.*")
pipeline("replay.cpp", "if (each.rank == rank) {", "if (each.rank != rank) {",
    "Replays.*")

claims("run/report.cpp", "<= 1e-9 * step_s ?", "<= 1e-6 * step_s ?", "Report.Time*")
claims("run/report.cpp",
       "claims.insert(claims.end(), rank.held.begin(), rank.held.end());", "",
       "Report.*")
of_replicas("run/worlds.cpp", "  adopt_peaks(predicted, report);\n", "",
            "*Worlds.AllClaimsHoldOnOneDevice*")
claims("run/training.cpp",
       "RankContext::current().device.note_held(MemoryKind::kActivation);", "",
       "Report.Held*")
