#include "chapters/15_engine/loader.h"

#include <algorithm>
#include <utility>

#include "chapters/02_ddp/sampler.h"
#include "core/check.h"
#include "core/ops.h"

namespace shardbook::engine {

TrainingData training_data(const Dataset& data, std::int64_t num_samples) {
  TrainingData samples;
  samples.num_samples = num_samples > 0 ? num_samples : data.num_samples();
  samples.batch = [data](const std::vector<std::int64_t>& numbers) {
    Tensors inputs, targets;
    for (const std::int64_t number : numbers) {
      // Step i of global batches of one sample is sample i
      const Batch one = data.batch(number, 1);
      inputs.push_back(one.inputs);
      targets.push_back(one.targets);
    }
    Batch all;
    all.inputs = concat(inputs, 0);
    all.targets = concat(targets, 0);
    return all;
  };
  return samples;
}

Loader::Loader(TrainingData data, const LoaderOptions& options,
               const ProcessGroup& dp)
    : data_(std::move(data)),
      options_(options),
      ranks_(dp.size()),
      rank_(dp.rank()) {
  SB_CHECK(options.micro_batch_size >= 1, "loader: micro-batches of ",
           options.micro_batch_size, " samples; give at least one");
  set_epoch(0);
}

void Loader::set_epoch(std::int64_t epoch) {
  ddp::SamplerOptions deal;
  deal.shuffle = options_.shuffle;
  deal.seed = options_.seed;
  ddp::DistributedSampler sampler(data_.num_samples, ranks_, rank_, deal);
  sampler.set_epoch(epoch);
  samples_ = sampler.indices();
  epoch_ = epoch;
  next_ = 0;
}

std::int64_t Loader::size() const {
  const auto n = static_cast<std::int64_t>(samples_.size());
  return (n + options_.micro_batch_size - 1) / options_.micro_batch_size;
}

std::optional<Batch> Loader::next() {
  if (next_ == samples_.size()) {
    set_epoch(epoch_ + 1);
    return std::nullopt;
  }
  const std::size_t end =
      std::min(next_ + static_cast<std::size_t>(options_.micro_batch_size),
               samples_.size());
  const auto at = [&](std::size_t i) {
    return samples_.begin() + static_cast<std::ptrdiff_t>(i);
  };
  const std::vector<std::int64_t> numbers(at(next_), at(end));
  next_ = end;
  return data_.batch(numbers);
}

Batch Loader::next_repeating() {
  std::optional<Batch> batch = next();
  if (!batch) batch = next();
  return *batch;
}

}  // namespace shardbook::engine
