#pragma once

// Attention on one device, and the same on ranks: outputs, gradients, records.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "comm/ledger.h"
#include "core/autograd.h"
#include "tests/core/support.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace shardbook::sequence_parallel {

// Sums over keys in another order: rounding of f64 over some dozens of terms.
constexpr double kF64 = 1e-12;
// The same in f32, where gradients are sums of products of such sums.
constexpr double kF32 = 1e-5;

inline const std::vector<Layout>& all_layouts() {
  static const std::vector<Layout> kAll = {Layout::kContiguous, Layout::kZigzag,
                                           Layout::kStriped};
  return kAll;
}

/// Sizes of one attention; `kv_heads` 0: as many as heads.
struct Setting {
  std::int64_t batch = 2, sequence = 24, heads = 4, kv_heads = 0, head_dim = 5;
  bool causal = true;
  double dropout = 0;
  DType dtype = DType::kF64;
};

inline std::int64_t kv_heads_of(const Setting& s) {
  return s.kv_heads == 0 ? s.heads : s.kv_heads;
}

inline AttentionOptions options_of(const Setting& s) {
  AttentionOptions options;
  options.heads = s.heads;
  options.kv_heads = s.kv_heads;
  options.causal = s.causal;
  options.dropout = s.dropout;
  return options;
}

/// q, k, v and the gradient of the output: the same on every rank, and
/// different for every token.
inline Tensors whole_inputs(const Setting& s) {
  const std::int64_t q_width = s.heads * s.head_dim;
  const std::int64_t k_width = kv_heads_of(s) * s.head_dim;
  const TensorOptions like{s.dtype, Device()};
  return {noise({s.batch, s.sequence, q_width}, 1, -2, 2, like),
          noise({s.batch, s.sequence, k_width}, 2, -2, 2, like),
          noise({s.batch, s.sequence, k_width}, 3, -2, 2, like),
          noise({s.batch, s.sequence, q_width}, 4, -1, 1, like)};
}

using Attention =
    std::function<Tensor(const Tensor& q, const Tensor& k, const Tensor& v)>;

/// out, dq, dk, dv for these inputs (whole_inputs, or a rank's part).
inline Tensors run_attention(const Tensors& inputs,
                             const Attention& attention) {
  // One step's random numbers, the same on every rank
  ContextValue<RandomState> state(&RankContext::random,
                                  RandomState{3, 1, 0, {2, 3}});
  Tensors leaves;
  for (int i = 0; i < 3; ++i) {
    leaves.push_back(inputs[static_cast<std::size_t>(i)].clone());
    leaves.back().set_requires_grad();
  }
  const Tensor out = attention(leaves[0], leaves[1], leaves[2]);
  {
    PhaseScope phase(Phase::kBackward);
    autograd::backward({out}, {inputs[3]});
  }
  return {out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
}

inline Tensors one_device(const Setting& s) {
  return run_attention(whole_inputs(s),
                       [&](const Tensor& q, const Tensor& k, const Tensor& v) {
                         return attention(q, k, v, options_of(s));
                       });
}

/// The ranks' out, dq, dk, dv of the whole sequence, and rank r's calls.
struct OnRanks {
  Tensors whole;
  std::vector<std::vector<CommRecord>> records;
};

using RankAttention = std::function<Tensor(const Tensor& q, const Tensor& k,
                                           const Tensor& v, ProcessGroup& cp)>;

/// This rank's part of whole_inputs.
inline Tensors own_inputs(const Setting& s, Layout layout,
                          const ProcessGroup& world) {
  Tensors inputs;
  for (const Tensor& whole : whole_inputs(s)) {
    inputs.push_back(
        cut_sequence(whole, 1, layout, world.rank(), world.size()));
  }
  return inputs;
}

/// Applies `attention` to each rank's tokens, and joins the results.
inline OnRanks on_tokens(int c, const Setting& s, Layout layout,
                         const RankAttention& attention) {
  OnRanks result;
  result.records.resize(static_cast<std::size_t>(c));
  const auto parts = on_ranks(c, [&](ProcessGroup& world) {
    const Tensors found =
        run_attention(own_inputs(s, layout, world),
                      [&](const Tensor& q, const Tensor& k, const Tensor& v) {
                        return attention(q, k, v, world);
                      });
    result.records[static_cast<std::size_t>(world.rank())] = world.records();
    std::vector<std::vector<double>> values;
    for (const Tensor& x : found) values.push_back(x.to_vector<double>());
    return values;
  });
  const Tensors inputs = whole_inputs(s);
  for (std::size_t i = 0; i < 4; ++i) {
    const Tensor& like = inputs[i == 0 ? 3 : i - 1];
    Tensors own;
    for (const auto& part : parts) {
      own.push_back(Tensor::from_values<double>(
          part[i], {like.size(0), like.size(1) / c, like.size(2)}));
    }
    result.whole.push_back(join_sequence(own, 1, layout));
  }
  return result;
}

inline OnRanks on_slices(int c, const Setting& s,
                         const RankAttention& attention) {
  return on_tokens(c, s, Layout::kContiguous, attention);
}

/// "send 80", ...: a rank's calls, without receives.
inline std::vector<std::string> calls_of(
    const std::vector<CommRecord>& records) {
  std::vector<std::string> calls;
  for (const CommRecord& record : records) {
    if (record.op == CommOp::kRecv) continue;
    calls.push_back(std::string(comm_op_name(record.op)) + " " +
                    std::to_string(record.numel));
  }
  return calls;
}

inline double elements_of(const std::vector<CommRecord>& records) {
  double elements = 0;
  for (const CommRecord& record : records) elements += wire_elements(record);
  return elements;
}

/// |a - b| <= tolerance (1 + |b|) in all of out, dq, dk and dv.
inline void expect_all_close(const Tensors& found, const Tensors& expected,
                             double tolerance) {
  const char* const names[] = {"out", "dq", "dk", "dv"};
  for (std::size_t i = 0; i < 4; ++i) {
    SCOPED_TRACE(names[i]);
    expect_close(found[i], expected[i], tolerance);
  }
}

}  // namespace shardbook::sequence_parallel
