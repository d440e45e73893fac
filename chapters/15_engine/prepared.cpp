#include "chapters/15_engine/prepared.h"

#include <algorithm>
#include <utility>

#include "chapters/02_ddp/sampler.h"
#include "chapters/15_engine/internal/loop.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::accelerate {

// --- Loaders -----------------------------------------------------------------

std::int64_t internal::batch_of_a_rank(const ShardOptions& options, int ranks) {
  const std::int64_t n = ranks;
  SB_CHECK(options.batch_size >= 1, "prepare: batch_size ", options.batch_size,
           ": give 1 or more");
  if (!options.split_batches) return options.batch_size;
  SB_CHECK(options.batch_size % n == 0,
           "prepare: split_batches with batch_size ", options.batch_size,
           ": does not divide by ", n, " processes; give ",
           (options.batch_size / n + 1) * n);
  return options.batch_size / n;
}

std::vector<std::vector<std::int64_t>> shard_batches(
    const std::vector<std::int64_t>& samples, const ShardOptions& options,
    int ranks, int rank) {
  // A round: one batch for each process
  const std::int64_t per_rank = internal::batch_of_a_rank(options, ranks);
  const std::int64_t round = per_rank * ranks;
  const auto given = static_cast<std::int64_t>(samples.size());
  std::int64_t end = given;
  if (options.drop_last) {
    end = given / round * round;
  } else if (options.even_batches && ranks > 1) {
    end = (given + round - 1) / round * round;
  }
  std::vector<std::vector<std::int64_t>> batches;
  for (std::int64_t first = rank * per_rank; first < end; first += round) {
    std::vector<std::int64_t> batch;
    for (std::int64_t i = first; i < std::min(first + per_rank, end); ++i) {
      // Behind the last sample come the first ones again
      batch.push_back(samples[static_cast<std::size_t>(i % given)]);
    }
    batches.push_back(std::move(batch));
  }
  return batches;
}

namespace internal {

void LoaderState::begin_epoch(std::int64_t number) {
  ddp::SamplerOptions order;
  order.shuffle = loader.shuffle;
  order.seed = loader.seed;
  ddp::DistributedSampler all(loader.data.num_samples, 1, 0, order);
  all.set_epoch(number);
  epoch = number;
  next = 0;
  batches = shard_batches(all.indices(), setup, ranks, rank);
  remainder = setup.drop_last ? 0 : loader.data.num_samples % round();
}

bool LoaderState::gives_even_batches() const {
  return setup.even_batches || setup.drop_last || remainder == 0 || ranks == 1;
}

void Loop::set_lr() {
  if (scheduler) backend->optimizer().set_lr(scheduler->lr());
}

}  // namespace internal

PreparedLoader::PreparedLoader(std::shared_ptr<internal::LoaderState> state)
    : state_(std::move(state)) {}

std::optional<Batch> PreparedLoader::next() {
  internal::LoaderState& state = *state_;
  const std::shared_ptr<internal::Loop> loop = state.loop.lock();
  if (state.is_at_end()) {
    state.begin_epoch(state.epoch + 1);
    if (loop) loop->active.reset();
    return std::nullopt;
  }
  if (loop) loop->active = state_;
  const std::vector<std::int64_t>& samples = state.batches[state.next];
  Batch batch = state.loader.data.batch(samples);
  batch.slice = BatchSlice{
      state.rank * internal::batch_of_a_rank(state.setup, state.ranks), 1};
  RandomState& random = RankContext::current().random;
  random.step = static_cast<std::uint64_t>(state.epoch * size()) + state.next;
  random.next_op = 0;
  random.batch = batch.slice;
  state.next += 1;
  return batch;
}

std::int64_t PreparedLoader::size() const {
  return static_cast<std::int64_t>(state_->batches.size());
}
std::int64_t PreparedLoader::epoch() const { return state_->epoch; }
std::int64_t PreparedLoader::batches_done() const {
  return static_cast<std::int64_t>(state_->next);
}
const std::vector<std::vector<std::int64_t>>& PreparedLoader::batches() const {
  return state_->batches;
}

// --- Model, optimizer, scheduler ---------------------------------------------

Tensor PreparedModel::operator()(const Tensor& inputs) {
  return loop_->backend->forward(inputs);
}
Tensor PreparedModel::loss(const Batch& batch) {
  return loop_->backend->loss(batch);
}
Tensors PreparedModel::parameters() const {
  return loop_->backend->parameters();
}

void PreparedOptimizer::step() {
  if (loop_->sync_gradients) loop_->backend->step();
}
void PreparedOptimizer::zero_grad() {
  if (loop_->sync_gradients) loop_->backend->zero_grad();
}
bool PreparedOptimizer::step_was_skipped() const {
  return loop_->backend->was_skipped();
}
double PreparedOptimizer::lr() const {
  return loop_->backend->optimizer().options().lr;
}

void PreparedScheduler::step() {
  internal::Loop& loop = *loop_;
  if (!loop.scheduler || !loop.sync_gradients) return;
  if (loop.backend->was_skipped()) return;
  // As often as one process would have called it for the same samples
  const int ranks = loop.split_batches ? 1 : loop.backend->data_group().size();
  for (int i = 0; i < ranks; ++i) loop.scheduler->step();
  loop.set_lr();
}

double PreparedScheduler::get_last_lr() const {
  return loop_->backend->optimizer().options().lr;
}
std::int64_t PreparedScheduler::steps_done() const {
  return loop_->scheduler ? loop_->scheduler->steps_done() : 0;
}

}  // namespace shardbook::accelerate
