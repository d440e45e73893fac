#include "chapters/common/sharded/parts.h"

#include <algorithm>

#include "core/check.h"
#include "core/context.h"
#include "core/copy_runs.h"
#include "core/inplace.h"
#include "core/ops.h"

namespace shardbook {
namespace {

/// A table with a row for each token, which may be padded.
bool is_vocabulary(const std::string& name) {
  return name == "transformer.wte.weight" ||
         name == "model.embed_tokens.weight" || name == "lm_head.weight";
}

int first_holder(const ParameterLayout& layout, const std::string& name,
                 int rank) {
  const Shards part = layout(name, rank);
  int first = 0;
  while (!(layout(name, first) == part)) ++first;
  return first;
}

}  // namespace

bool is_first_holder(const ParameterLayout& layout, const std::string& name,
                     int rank) {
  return first_holder(layout, name, rank) == rank;
}

Tensors first_held(const Tensor& values, const Shards& shards) {
  for (const Shard& shard : shards) {
    const bool are_shared = std::any_of(
        shard.columns.begin(), shard.columns.end(), [&](const Columns& each) {
          return each.parts_on(shard.count) < shard.count;
        });
    if (!are_shared) continue;
    const std::vector<IndexRun> held = first_held(shard);
    Tensors parts;
    for (const IndexRun& run : held) {
      parts.push_back(
          slice(values, shard.dim, run.begin, run.begin + run.count));
    }
    return parts;
  }
  return {values};
}

PartOf part_of(const ParameterLayout& layout, int rank,
               std::int64_t padded_vocabulary) {
  return [=](const std::string& name) {
    return PartOfFile{layout(name, rank),
                      is_vocabulary(name) ? padded_vocabulary : 0};
  };
}

std::vector<NamedTensor> gather_parts(const std::vector<NamedTensor>& parts,
                                      const ParameterLayout& layout,
                                      ProcessGroup& group,
                                      std::int64_t vocabulary) {
  std::vector<NamedTensor> state;
  const NoGrad no_grad;
  int tag = 0;
  for (const NamedTensor& part : parts) {
    if (group.rank() != 0) {
      if (is_first_holder(layout, part.name, group.rank())) {
        // Tensors collected by a pipeline may lie on the host
        group.send(to_device(part.tensor, Device()), 0, tag).wait();
      }
      ++tag;
      continue;
    }
    const Shape shape = whole_shape(layout(part.name, 0), part.tensor.shape());
    Tensor whole = Tensor::empty(shape, {part.tensor.dtype(), Device()});
    for (int rank = 0; rank < group.size(); ++rank) {
      if (!is_first_holder(layout, part.name, rank)) continue;
      const Shards shards = layout(part.name, rank);
      Tensor theirs = Tensor::empty(shape_of(shards, shape), whole.options());
      if (rank == 0) {
        theirs.copy_from(part.tensor);
      } else {
        group.recv(theirs, rank, tag).wait();
      }
      put_part(whole, theirs, shards);
    }
    ++tag;
    if (is_vocabulary(part.name)) whole = whole.rows_view(0, vocabulary);
    state.push_back({part.name, whole});
  }
  return state;
}

void place_parts(TrainingState& state, const ParameterLayout& layout, int rank,
                 std::int64_t vocabulary) {
  for (StatePart& part : state.parts) {
    part.shards = layout(part.name, rank);
    part.whole = whole_shape(part.shards, part.whole);
    if (!is_vocabulary(part.name)) continue;
    part.padded_rows = part.whole[0];
    part.whole[0] = vocabulary;
  }
}

std::int64_t padded_vocabulary(std::int64_t vocabulary, std::int64_t parts) {
  return (vocabulary + parts - 1) / parts * parts;
}

void check_divides(const std::string& what, std::int64_t n, std::int64_t parts,
                   const std::string& why) {
  SB_CHECK(n % parts == 0, what, " ", n, ": ", why, " ", parts, " parts; give ",
           n / parts * parts + parts);
}

void sum_over_ranks(ProcessGroup& group, const Tensors& values,
                    const std::string& label, double factor) {
  if (values.empty()) return;
  if (group.size() == 1) {
    if (factor == 1) return;
    for (const Tensor& value : values) scale_into(value, value, factor);
    return;
  }
  std::int64_t numel = 0;
  for (const Tensor& value : values) numel += value.numel();
  Tensor sums;
  {
    const MemoryScope kind(MemoryKind::kCommunication);
    sums = Tensor::zeros({numel}, values[0].options());
  }
  std::vector<CopyRun> there, back;
  std::int64_t next = 0;
  for (const Tensor& value : values) {
    const Tensor place = sums.flat_view(next, value.shape());
    next += value.numel();
    there.push_back({place, value});
    back.push_back({value, place});
  }
  copy_runs(there, factor);
  group.all_reduce(sums, ReduceOp::kSum, label).wait();
  copy_runs(back);
}

std::vector<double> sum_over_ranks(ProcessGroup& group,
                                   const std::vector<double>& numbers,
                                   const std::string& label) {
  const MemoryScope kind(MemoryKind::kCommunication);
  const auto n = static_cast<std::int64_t>(numbers.size());
  const Tensor sums = Tensor::full({n}, numbers[0], {DType::kF64, Device()});
  const auto at = [&](std::size_t i) {
    const auto row = static_cast<std::int64_t>(i);
    return sums.rows_view(row, row + 1);
  };
  for (std::size_t i = 1; i < numbers.size(); ++i) at(i).fill(numbers[i]);
  group.all_reduce(sums, ReduceOp::kSum, label).wait();
  std::vector<double> result;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    result.push_back(at(i).item());
  }
  return result;
}

double sum_over_ranks(ProcessGroup& group, double number,
                      const std::string& label) {
  return sum_over_ranks(group, std::vector<double>{number}, label)[0];
}

void sum_gradients(ProcessGroup& group, const Tensors& parameters,
                   const std::string& label, double factor) {
  if (group.size() == 1 && factor == 1) return;
  Tensors grads;
  for (const Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) {
      const MemoryScope kind(MemoryKind::kGradient);
      parameter.set_grad(parameter.zeros_like());
    }
    grads.push_back(parameter.grad());
  }
  sum_over_ranks(group, grads, label, factor);
}

}  // namespace shardbook
