#include "chapters/07_tensor_parallel/partial_gradients.h"

#include <algorithm>
#include <string>

#include "chapters/common/sharded/parts.h"
#include "core/context.h"
#include "core/copy_runs.h"

namespace shardbook::tensor_parallel {
namespace {

/// Of the product for queries, keys and values, the columns on a rank that are
/// its own, and those behind them that its neighbours hold, too.
struct OwnAndShared {
  std::int64_t own = 0, shared = 0;
};

OwnAndShared columns_on(const BlockPart& qkv, int t) {
  OwnAndShared columns;
  for (const Columns& each : qkv.columns) {
    const std::int64_t parts = each.parts_on(t);
    (parts < t ? columns.shared : columns.own) += each.width / parts;
  }
  return columns;
}

bool is_of(const BlockPart& part, const std::string& parameter) {
  const std::string module = parameter.substr(0, parameter.rfind('.'));
  return module.ends_with("." + part.name);
}

}  // namespace

PartialSizes partial_sizes(const ModelConfig& config, int t) {
  PartialSizes sizes;
  if (t == 1) return sizes;
  const BlockTable block = block_table(config);
  const auto layers = static_cast<double>(config.n_layer);
  for (const BlockPart& norm : block.head_norms) {
    sizes.norms += layers * norm.parameters();
  }
  const std::int64_t rows = block.qkv.in + (block.qkv.bias ? 1 : 0);
  sizes.shared =
      layers * static_cast<double>(columns_on(block.qkv, t).shared * rows);
  for (const Columns& each : block.qkv.columns) {
    const auto holders = static_cast<int>(t / each.parts_on(t));
    sizes.sharers = std::max(sizes.sharers, holders);
  }
  return sizes;
}

PartialGradients::PartialGradients(const ModelConfig& config, ProcessGroup& tp)
    : config_(config), tp_(tp) {
  const int together = partial_sizes(config, tp.size()).sharers;
  if (together == 1) return;
  // Neighbours have the queries of one head of keys
  std::vector<std::vector<int>> groups;
  for (int rank = 0; rank < tp.size(); ++rank) {
    if (rank % together == 0) groups.emplace_back();
    groups.back().push_back(rank);
  }
  sharers_ = tp.partition(groups, "kv");
}

void PartialGradients::sum(const std::vector<NamedTensor>& parameters) const {
  if (tp_.size() == 1) return;
  const BlockTable block = block_table(config_);
  Tensors norms, of_keys;
  for (const NamedTensor& each : parameters) {
    for (const BlockPart& norm : block.head_norms) {
      if (is_of(norm, each.name)) norms.push_back(each.tensor);
    }
    if (sharers_ && is_of(block.qkv, each.name))
      of_keys.push_back(each.tensor.grad());
  }
  // Every rank saw its own heads
  sum_gradients(tp_, norms, "norms of heads");
  if (of_keys.empty()) return;

  // The last columns of each gradient, one behind the other
  const auto [own, shared] = columns_on(block.qkv, tp_.size());
  std::int64_t rows = 0;
  for (const Tensor& grad : of_keys) rows += grad.numel() / (own + shared);
  Tensor sums;
  {
    const MemoryScope kind(MemoryKind::kCommunication);
    sums = Tensor::empty({rows, shared}, of_keys[0].options());
  }
  std::vector<CopyRun> there, back;
  std::int64_t next = 0;
  for (const Tensor& grad : of_keys) {
    const std::int64_t count = grad.numel() / (own + shared);
    const Tensor place = sums.rows_view(next, next + count);
    const Tensor columns = grad.flat_view(own, {grad.numel() - own});
    there.push_back({place, columns, count, shared, shared, own + shared});
    back.push_back({columns, place, count, shared, own + shared, shared});
    next += count;
  }
  copy_runs(there);
  sharers_->all_reduce(sums, ReduceOp::kSum, "shared keys").wait();
  copy_runs(back);
}

}  // namespace shardbook::tensor_parallel
