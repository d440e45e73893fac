#pragma once

// Small models under FSDP for the tests.

#include <string>
#include <vector>

#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "chapters/common/models/data.h"
#include "chapters/common/models/models.h"
#include "tests/chapters/02_ddp/ddp_support.h"

namespace shardbook::fsdp_test {

using namespace ddp_test;  // NOLINT: the helpers of the tests next door
using fsdp::FsdpOptions;
using fsdp::FullyShardedDataParallel;
using fsdp::ShardingStrategy;
using Numels = std::vector<std::int64_t>;

using Labels = std::vector<std::string>;

/// 8-4-16-4: parameters of 32, 4, 64, 16, 64, 4 elements.
inline Sequential toy_net(DType dtype = DType::kF32) {
  Sequential model;
  model.add(Linear("0", 8, 4, init_of(dtype)));
  model.add(Linear("1", 4, 16, init_of(dtype)));
  model.add(Linear("2", 16, 4, init_of(dtype)));
  return model;
}

inline fsdp::WrapPolicy every_linear() {
  return fsdp::transformer_auto_wrap_policy({"Linear"});
}

inline fsdp::WrapPolicy every_block() {
  return fsdp::transformer_auto_wrap_policy({"GptBlock"});
}

inline ModelConfig tiny_gpt_config() { return {"gpt2", 19, 8, 12, 3, 2}; }

/// Tokens and targets of `rows` samples, rows first, first + stride, ...
inline Batch tokens_of(std::int64_t rows, std::uint64_t seed, int first,
                       int stride) {
  constexpr std::int64_t kSeq = 8;
  std::vector<std::int64_t> inputs, targets;
  for (std::int64_t i = first; i < rows; i += stride) {
    for (std::int64_t j = 0; j < kSeq; ++j) {
      const auto token = [&](std::int64_t at) {
        return static_cast<std::int64_t>(
            (seed * 31 + static_cast<std::uint64_t>(i * i * 7 + at * 5 + i)) %
            19);
      };
      inputs.push_back(token(j));
      targets.push_back(token(j + 1));
    }
  }
  const auto n = static_cast<std::int64_t>(inputs.size()) / kSeq;
  Batch batch;
  batch.inputs = Tensor::from_values<std::int64_t>(inputs, {n, kSeq});
  batch.targets = Tensor::from_values<std::int64_t>(targets, {n, kSeq});
  return batch;
}

/// All parameters, whole, in the order of definition.
inline Values whole_parameters(FullyShardedDataParallel& fsdp) {
  const auto scope = fsdp.summon_full_params(/*writeback=*/false);
  return values_of(fsdp.module().parameters());
}

/// Labels of the records of a group.
inline Labels labels_of(const std::vector<CommRecord>& records) {
  Labels labels;
  for (const CommRecord& record : records) labels.push_back(record.label);
  return labels;
}

}  // namespace shardbook::fsdp_test
