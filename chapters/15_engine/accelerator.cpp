#include "chapters/15_engine/accelerator.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "chapters/15_engine/internal/loop.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/run_identity.h"
#include "chapters/common/run/state_folder.h"
#include "core/check.h"
#include "core/context.h"
#include "core/inplace.h"

namespace shardbook::accelerate {

Accelerator::Accelerator(const AcceleratorOptions& options, ProcessGroup& world)
    : options_(options),
      world_(world),
      loop_(std::make_shared<internal::Loop>()) {
  const std::string& precision = options.mixed_precision;
  SB_CHECK(precision == "no" || precision == "bf16" || precision == "fp16",
           "Accelerator: mixed_precision ", precision,
           ": give no, bf16 or fp16");
  SB_CHECK(options.gradient_accumulation_steps >= 1,
           "Accelerator: gradient_accumulation_steps ",
           options.gradient_accumulation_steps, ": give 1 or more");
  SB_CHECK(!options.cpu || !device().is_cuda(),
           "Accelerator: cpu true, but this rank was started on ",
           device().name(), "; start it with --device cpu");
  loop_->split_batches = options.split_batches;
}

// --- Prepare -----------------------------------------------------------------

namespace {

/// A config and a script must not both have an optimizer, or a scheduler.
void check_one_owner(const engine::DeepSpeedConfig& config,
                     const engine::OptimizerConfig& optimizer,
                     const Scheduler& scheduler) {
  SB_CHECK(config.optimizer.type.empty() || optimizer.type.empty(),
           config.label, ": /optimizer/type ", config.optimizer.type,
           ", and prepare is given an optimizer ", optimizer.type,
           " as well; take the section out, or leave the type out");
  SB_CHECK(config.scheduler.type.empty() || !scheduler.native, config.label,
           ": /scheduler/type ", config.scheduler.type,
           ", and prepare is given a scheduler as well; keep one of them");
}

}  // namespace

std::unique_ptr<internal::Backend> Accelerator::make_backend(
    Module& model, const engine::OptimizerConfig& optimizer,
    const DataLoader& loader, const Scheduler& scheduler) {
  const internal::Plan plan{model, world_, optimizer, options_.mixed_precision,
                            options_.gradient_accumulation_steps};
  const Plugin& plugin = options_.plugin;
  const ShardOptions setup = shard_options(loader);

  // The engine: a config with the script's values, in which "auto" is filled
  if (const auto* deepspeed = std::get_if<DeepSpeedPlugin>(&plugin)) {
    KnownValues known = {
        .micro_batch_size = internal::batch_of_a_rank(setup, world_.size()),
        .accumulation = plan.accumulation,
        .data_parallel_ranks = world_.size(),
        .mixed_precision = options_.mixed_precision,
        .optimizer = optimizer,
        .warmup_num_steps = scheduler.warmup_num_steps,
        .total_num_steps = scheduler.total_num_steps};
    if (const auto* gpt = dynamic_cast<const Gpt*>(&model)) {
      known.hidden_size = gpt->config.n_embd;
    }
    const engine::DeepSpeedConfig config = deepspeed_config(*deepspeed, known);
    check_one_owner(config, optimizer, scheduler);
    return internal::make_engine(plan, config);
  }

  // The other libraries: no config, so the script has an optimizer
  SB_CHECK(!optimizer.type.empty(),
           "prepare: the optimizer has no type, which only a DeepSpeedPlugin's "
           "config can give; give Adam, AdamW or SGD");
  if (const auto* fsdp = std::get_if<FullyShardedDataParallelPlugin>(&plugin)) {
    return internal::make_fsdp(plan, *fsdp);
  }
  if (const auto* megatron = std::get_if<MegatronLMPlugin>(&plugin)) {
    const int dp = hybrid_options(*megatron, world_.size()).dp;
    std::vector<std::int64_t> samples(
        static_cast<std::size_t>(internal::batch_of_a_rank(setup, dp)));
    for (std::size_t i = 0; i < samples.size(); ++i) {
      samples[i] = static_cast<std::int64_t>(i) % loader.data.num_samples;
    }
    return internal::make_megatron(plan, *megatron, loader.data.batch(samples));
  }
  return internal::make_ddp(plan,
                            std::get<DistributedDataParallelPlugin>(plugin));
}

ShardOptions Accelerator::shard_options(const DataLoader& loader) const {
  return {loader.batch_size, options_.split_batches, options_.even_batches,
          loader.drop_last};
}

PreparedLoader Accelerator::shard(const DataLoader& loader,
                                  const ProcessGroup& group) {
  SB_CHECK(loader.data.num_samples >= 1,
           "prepare: the loader has no samples; give one or more");
  auto state = std::make_shared<internal::LoaderState>();
  state->loader = loader;
  state->setup = shard_options(loader);
  state->ranks = group.size();
  state->rank = group.rank();
  state->loop = loop_;
  state->begin_epoch(0);
  return PreparedLoader(state);
}

Prepared Accelerator::prepare(Module& model,
                              const engine::OptimizerConfig& optimizer,
                              const DataLoader& loader,
                              const Scheduler& scheduler) {
  SB_CHECK(!loop_->backend,
           "prepare: this Accelerator has a model already; make another one "
           "for a second model");

  // Wrap the model, and make the optimizer behind the wrapper
  loop_->backend = make_backend(model, optimizer, loader, scheduler);

  // Deal out batches over the ranks that do not share a model
  PreparedLoader dealt = shard(loader, loop_->backend->data_group());
  SB_CHECK(dealt.state_->gives_even_batches(),
           "prepare: even_batches false: ", loader.data.num_samples,
           " samples in batches of ", loader.batch_size,
           " leave some ranks without a full last batch, while the others wait "
           "for their gradients; give even_batches true, or drop_last");
  SB_CHECK(dealt.size() >= 1, "prepare: drop_last leaves no batch of ",
           loader.data.num_samples, " samples; give fewer per batch");
  loop_->training = dealt.state_;

  // The schedule begins with its first rate
  loop_->scheduler = scheduler.native;
  loop_->set_lr();
  return {PreparedModel(loop_), PreparedOptimizer(loop_), dealt,
          PreparedScheduler(loop_)};
}

PreparedLoader Accelerator::prepare(const DataLoader& loader) {
  return shard(loader, data_group());
}

ProcessGroup& Accelerator::data_group() const {
  return loop_->backend ? loop_->backend->data_group() : world_;
}

internal::Backend& Accelerator::backend(const char* call) const {
  SB_CHECK(loop_->backend != nullptr, "Accelerator: ", call,
           " before prepare, which is given the model");
  return *loop_->backend;
}

// --- The loop ----------------------------------------------------------------

Accumulate::Accumulate(std::shared_ptr<internal::Loop> loop)
    : loop_(std::move(loop)) {
  loop_->backend->begin_micro_step(loop_->sync_gradients);
}
Accumulate::~Accumulate() { loop_->backend->end_micro_step(); }

Accumulate Accelerator::accumulate(PreparedModel&) {
  backend("accumulate");
  internal::Loop& loop = *loop_;
  // A window ends when it is full, or with the loader
  loop.step += 1;
  loop.sync_gradients = loop.step % options_.gradient_accumulation_steps == 0 ||
                        loop.training->is_at_end();
  if (loop.sync_gradients) loop.step = 0;
  return Accumulate(loop_);
}

bool Accelerator::sync_gradients() const { return loop_->sync_gradients; }

void Accelerator::backward(const Tensor& loss) {
  SB_CHECK(loss.numel() == 1, "Accelerator: backward of a loss of shape ",
           shape_text(loss.shape()), "; give one number, such as a mean");
  backend("backward").backward(loss);
}

std::optional<double> Accelerator::clip_grad_norm_(const Tensors& parameters,
                                                   double max_norm) {
  internal::Backend& backend = this->backend("clip_grad_norm_");
  const Tensors all = backend.parameters();
  bool is_same = parameters.size() == all.size();
  for (std::size_t i = 0; is_same && i < all.size(); ++i) {
    is_same = parameters[i].is_same(all[i]);
  }
  SB_CHECK(is_same, "clip_grad_norm_: ", parameters.size(),
           " tensors that are not the prepared model's parameters: a plugin "
           "knows the norm of all of them; give model.parameters()");
  if (!loop_->sync_gradients) return std::nullopt;
  return backend.clip(max_norm);
}

// --- Processes ---------------------------------------------------------------

const Device& Accelerator::device() const {
  return RankContext::current().device;
}

void Accelerator::print(const std::string& line) const {
  if (!is_main_process()) return;
  std::fprintf(stdout, "%s\n", line.c_str());
  std::fflush(stdout);
}

Tensor Accelerator::gather(const Tensor& tensor) {
  ProcessGroup& group = data_group();
  const MemoryScope kind(MemoryKind::kCommunication);
  Shape shape = tensor.shape();
  if (shape.empty()) shape = {1};
  shape[0] *= group.size();
  const Tensor all = Tensor::empty(shape, tensor.options());
  const std::int64_t n = tensor.numel();
  all.flat_view(n * group.rank(), {n})
      .copy_from(tensor.detach().flat_view(0, {n}));
  group
      .all_gather(all.flat_view(0, {all.numel()}),
                  all.flat_view(n * group.rank(), {n}), "gather")
      .wait();
  return all;
}

Tensor Accelerator::gather_for_metrics(const Tensor& tensor) {
  const Tensor all = gather(tensor);
  const std::shared_ptr<internal::LoaderState> loader = loop_->active.lock();
  if (!loader || !loader->is_at_end() || loader->remainder == 0) return all;
  // The rows of the last round come in the order of samples
  SB_CHECK(all.size(0) >= loader->remainder,
           "gather_for_metrics: ", all.size(0), " rows for ", loader->remainder,
           " samples; give a row per sample");
  return all.rows_view(0, loader->remainder);
}

Tensor Accelerator::reduce(const Tensor& tensor, const std::string& reduction) {
  SB_CHECK(reduction == "sum" || reduction == "mean", "reduce: reduction ",
           reduction, ": give sum or mean");
  ProcessGroup& group = data_group();
  const MemoryScope kind(MemoryKind::kCommunication);
  const Tensor all = tensor.detach().clone();
  group.all_reduce(all, ReduceOp::kSum, "reduce").wait();
  if (reduction == "mean") scale_in_place(all, 1.0 / group.size());
  return all;
}

// --- The model, whole; the training, in files --------------------------------

Module& Accelerator::unwrap_model(PreparedModel&) {
  return backend("unwrap_model").module();
}

std::vector<NamedTensor> Accelerator::get_state_dict(PreparedModel&) {
  return backend("get_state_dict").full_state();
}

namespace {

/// FOLDER as its parent and its name.
std::pair<std::string, std::string> parts_of(const std::string& folder) {
  std::filesystem::path path(folder);
  if (path.filename().empty()) path = path.parent_path();
  const std::string name = path.filename().string();
  SB_CHECK(!name.empty() && name[0] != '.', "save_state: \"", folder,
           "\" is no name of a folder; give one such as step-100");
  const std::string parent = path.parent_path().string();
  return {parent.empty() ? "." : parent, name};
}

}  // namespace

void Accelerator::save_state(const std::string& folder) {
  internal::Backend& backend = this->backend("save_state");
  SB_CHECK(loop_->step == 0, "save_state: ", loop_->step,
           " batches into a window of gradient accumulation, whose gradients "
           "would be lost; call it where sync_gradients is true, after "
           "zero_grad");
  Manifest manifest;
  put_identity(options_.compared, manifest);
  std::map<std::string, double>& numbers = manifest.progress;
  numbers = backend.numbers();
  const internal::LoaderState& loader = *loop_->training;
  numbers["loader.epoch"] = static_cast<double>(loader.epoch);
  numbers["loader.samples"] = static_cast<double>(loader.samples_done());
  numbers["lr"] = backend.optimizer().options().lr;
  if (loop_->scheduler) {
    numbers["script.scheduler"] =
        static_cast<double>(loop_->scheduler->steps_done());
  }
  const auto [parent, name] = parts_of(folder);
  write_state_folder(parent, name, backend.state(), manifest, &world_);
}

void Accelerator::load_state(const std::string& folder) {
  internal::Backend& backend = this->backend("load_state");
  std::vector<std::string> needed = {"loader.epoch", "loader.samples", "lr"};
  if (loop_->scheduler) needed.push_back("script.scheduler");
  Manifest manifest;
  on_all_ranks(&world_, [&] {
    manifest = read_manifest(folder, needed);
    if (options_.compared.empty()) return;
    const std::string other = differences(manifest, options_.compared);
    SB_CHECK(other.empty(), "load_state: ", folder,
             " is of another run: ", other);
  });
  load_state_folder(folder, manifest, backend.state(), /*with_optimizer=*/true,
                    &world_);
  const std::map<std::string, double>& numbers = manifest.progress;
  const auto count = [&](const char* name) {
    return static_cast<std::int64_t>(numbers.at(name));
  };
  backend.set_numbers(numbers);
  backend.optimizer().set_lr(numbers.at("lr"));
  if (loop_->scheduler) {
    loop_->scheduler->set_steps_done(count("script.scheduler"));
    loop_->set_lr();
  }
  internal::LoaderState& loader = *loop_->training;
  const std::int64_t done = count("loader.samples"), round = loader.round();
  SB_CHECK(done % round == 0, "load_state: ", folder, " was written after ",
           done, " samples of an epoch, and the processes read ", round,
           " at a time here; give a batch_size whose rounds end there");
  loader.begin_epoch(count("loader.epoch"));
  loader.next =
      std::min(static_cast<std::size_t>(done / round), loader.batches.size());
  loop_->step = 0;
}

}  // namespace shardbook::accelerate
