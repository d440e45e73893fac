#include "core/kernels/attention.h"

#include <limits>

#include "core/check.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

// Operands with strides of their own, and everything that comes out.
struct Case {
  AttentionArgs args;
  AttentionGradStrides grads;
  std::vector<double> q, k, v, out, logsumexp, dout, dq, dk, dv;
};

HeadStrides dense(std::int64_t heads, std::int64_t rows, std::int64_t dim) {
  return {heads * rows * dim, rows * dim, dim};
}

Case make_case(std::int64_t batch, std::int64_t heads, std::int64_t kv_heads,
               std::int64_t q_rows, std::int64_t k_rows, std::int64_t dim,
               bool causal) {
  Case c;
  AttentionArgs& args = c.args;
  args.batch = batch, args.heads = heads, args.kv_heads = kv_heads;
  args.q_rows = q_rows, args.k_rows = k_rows, args.head_dim = dim;
  args.causal = causal;
  args.scale = 1.0 / std::sqrt(static_cast<double>(dim));
  args.q = args.out = dense(heads, q_rows, dim);
  args.k = args.v = dense(kv_heads, k_rows, dim);
  c.grads = {args.q, args.k, args.v, args.out};
  c.q = noise(batch * heads * q_rows * dim, 1);
  c.k = noise(batch * kv_heads * k_rows * dim, 2);
  c.v = noise(batch * kv_heads * k_rows * dim, 3);
  c.dout = noise(batch * heads * q_rows * dim, 4);
  for (double& x : c.q) x *= 3.0;
  return c;
}

// Forward and backward with the whole matrix of scores.
void reference(Case& c) {
  const AttentionArgs& a = c.args;
  const std::int64_t group = a.heads / a.kv_heads;
  c.out.assign(c.q.size(), 0.0);
  c.dq.assign(c.q.size(), 0.0);
  c.dk.assign(c.k.size(), 0.0);
  c.dv.assign(c.v.size(), 0.0);
  c.logsumexp.assign(a.batch * a.heads * a.q_rows, -kInf);
  std::vector<std::uint8_t> mask(a.batch * a.heads * a.q_rows * a.k_rows, 1);
  if (a.dropout > 0) {
    KernelContext context;
    dropout_mask(context, a.dropout_view, a.dropout_key, a.dropout,
                 mask.data());
  }
  for (std::int64_t b = 0; b < a.batch; ++b) {
    for (std::int64_t h = 0; h < a.heads; ++h) {
      for (std::int64_t i = 0; i < a.q_rows; ++i) {
        const auto q = [&](std::int64_t d) {
          return b * a.q.batch + h * a.q.head + i * a.q.row + d;
        };
        const auto k = [&](std::int64_t j, std::int64_t d) {
          return b * a.k.batch + h / group * a.k.head + j * a.k.row + d;
        };
        const std::int64_t row = (b * a.heads + h) * a.q_rows + i;
        std::vector<double> p(a.k_rows, 0.0), dp(a.k_rows, 0.0),
            keep(a.k_rows, 0.0);
        double max = -kInf, sum = 0.0;
        const auto seen = [&](std::int64_t j) {
          return !a.causal || a.q_position + i >= a.k_position + j;
        };
        for (std::int64_t j = 0; j < a.k_rows; ++j) {
          for (std::int64_t d = 0; d < a.head_dim; ++d) {
            p[j] += a.scale * c.q[q(d)] * c.k[k(j, d)];
          }
          if (seen(j)) max = std::max(max, p[j]);
        }
        if (max == -kInf) continue;
        for (std::int64_t j = 0; j < a.k_rows; ++j) {
          if (seen(j)) sum += std::exp(p[j] - max);
        }
        c.logsumexp[row] = max + std::log(sum);
        double delta = 0.0;
        for (std::int64_t j = 0; j < a.k_rows; ++j) {
          p[j] = seen(j) ? std::exp(p[j] - c.logsumexp[row]) : 0.0;
          keep[j] = mask[row * a.k_rows + j] / (1.0 - a.dropout);
          for (std::int64_t d = 0; d < a.head_dim; ++d) {
            c.out[q(d)] += p[j] * keep[j] * c.v[k(j, d)];
            c.dv[k(j, d)] += p[j] * keep[j] * c.dout[q(d)];
            dp[j] += keep[j] * c.dout[q(d)] * c.v[k(j, d)];
          }
          delta += p[j] * dp[j];
        }
        for (std::int64_t j = 0; j < a.k_rows; ++j) {
          const double ds = a.scale * p[j] * (dp[j] - delta);
          for (std::int64_t d = 0; d < a.head_dim; ++d) {
            c.dq[q(d)] += ds * c.k[k(j, d)];
            c.dk[k(j, d)] += ds * c.q[q(d)];
          }
        }
      }
    }
  }
}

class Attention : public KernelTest {
 protected:
  void check(Case c) {
    const Array q = array(c.q), k = array(c.k), v = array(c.v),
                dout = array(c.dout);
    c.q = q.values(), c.k = k.values(), c.v = v.values();
    c.dout = dout.values();
    reference(c);
    Array out = array(q.size()), dq = array(q.size());
    Array dk = array(k.size()), dv = array(k.size());
    Array logsumexp(stat_dtype(dtype), c.logsumexp.size());
    attention(context, dtype, c.args, q.data(), k.data(), v.data(), out.data(),
              logsumexp.data());
    const double slack = 4 * tolerance(dtype);
    expect_close(out.values(), c.out, slack);
    const auto total = logsumexp.values();
    for (std::size_t i = 0; i < total.size(); ++i) {
      if (c.logsumexp[i] == -kInf) {
        EXPECT_EQ(total[i], -kInf);
      } else {
        EXPECT_NEAR(total[i], c.logsumexp[i],
                    10 * tolerance(stat_dtype(dtype)));
      }
    }
    attention_backward(context, dtype, c.args, c.grads, q.data(), k.data(),
                       v.data(), out.data(), dout.data(), logsumexp.data(),
                       dq.data(), dk.data(), dv.data());
    const double grad_slack = slack * 4;
    expect_close(dq.values(), c.dq, grad_slack);
    expect_close(dk.values(), c.dk, grad_slack);
    expect_close(dv.values(), c.dv, grad_slack);

    // Adding to what is there
    Array more_dq = array(noise(q.size(), 5)),
          more_dk = array(noise(k.size(), 6)),
          more_dv = array(noise(k.size(), 7));
    auto sum_dq = more_dq.values(), sum_dk = more_dk.values(),
         sum_dv = more_dv.values();
    for (std::size_t i = 0; i < sum_dq.size(); ++i) sum_dq[i] += c.dq[i];
    for (std::size_t i = 0; i < sum_dk.size(); ++i) sum_dk[i] += c.dk[i];
    for (std::size_t i = 0; i < sum_dv.size(); ++i) sum_dv[i] += c.dv[i];
    attention_backward(context, dtype, c.args, c.grads, q.data(), k.data(),
                       v.data(), out.data(), dout.data(), logsumexp.data(),
                       more_dq.data(), more_dk.data(), more_dv.data(), true);
    expect_close(more_dq.values(), sum_dq, grad_slack);
    expect_close(more_dk.values(), sum_dk, grad_slack);
    expect_close(more_dv.values(), sum_dv, grad_slack);
  }
};

TEST_P(Attention, EqualsTheDefinition) {
  for (const bool causal : {false, true}) {
    check(make_case(1, 1, 1, 1, 1, 1, causal));
    check(make_case(2, 3, 3, 7, 7, 5, causal));
    check(make_case(1, 2, 2, 40, 40, 32, causal));
    check(make_case(1, 1, 1, 30, 75, 16, causal));
    check(make_case(1, 1, 1, 70, 33, 40, causal));
  }
}

TEST_P(Attention, JoinsBlocksOfKeys) {
  check(make_case(1, 1, 1, 20, 600, 24, false));
  Case c = make_case(1, 1, 1, 50, 600, 24, true);
  c.args.q_position = 550;
  check(c);
}

TEST_P(Attention, SharesKeyHeadsAmongQueryHeads) {
  check(make_case(2, 4, 2, 9, 13, 8, false));
  check(make_case(1, 6, 1, 20, 20, 8, true));
}

// Pieces of a sequence: some queries see nothing, some everything.
TEST_P(Attention, KnowsThePositionsOfItsPieces) {
  for (const std::int64_t k_position : {0, 5, 30, 100}) {
    Case c = make_case(1, 2, 2, 40, 20, 8, true);
    c.args.q_position = 10;
    c.args.k_position = k_position;
    check(c);
  }
}

TEST_P(Attention, DropsProbabilitiesByGlobalIndex) {
  Case c = make_case(2, 2, 2, 30, 30, 16, true);
  c.args.dropout = 0.3;
  c.args.dropout_key = {5, 6};
  c.args.dropout_view = whole_view({2, 2, 30, 30});
  check(c);
  // The second half of the heads of a larger model
  c.args.dropout_view = {{2, 2, 30, 30}, {4, 4, 60, 60}, {1, 2, 0, 30}, {}};
  check(c);
}

TEST_P(Attention, ReadsPackedProjections) {
  const std::int64_t batch = 2, heads = 3, rows = 11, dim = 20;
  const std::int64_t width = heads * dim;
  Case c = make_case(batch, heads, heads, rows, rows, dim, true);
  const Array qkv = array(noise(batch * rows * 3 * width, 1));
  Array out = array(batch * rows * width), packed_out = out;
  Array total(stat_dtype(dtype), batch * heads * rows), packed_total = total;
  // The same numbers, dense
  const auto all = qkv.values();
  std::vector<double> parts[3];
  for (int part = 0; part < 3; ++part) {
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t s = 0; s < rows; ++s) {
          for (std::int64_t d = 0; d < dim; ++d) {
            parts[part].push_back(
                all[((b * rows + s) * 3 + part) * width + h * dim + d]);
          }
        }
      }
    }
  }
  const Array q = array(parts[0]), k = array(parts[1]), v = array(parts[2]);
  attention(context, dtype, c.args, q.data(), k.data(), v.data(), out.data(),
            total.data());
  AttentionArgs packed = c.args;
  packed.q = packed.k = packed.v = {rows * 3 * width, dim, 3 * width};
  packed.out = {rows * width, dim, width};
  const auto part = [&](int i) {
    return static_cast<const char*>(qkv.data()) +
           i * width * dtype_bytes(dtype);
  };
  attention(context, dtype, packed, part(0), part(1), part(2),
            packed_out.data(), packed_total.data());
  EXPECT_TRUE(total == packed_total);
  const auto a = out.values(), p = packed_out.values();
  for (std::int64_t i = 0; i < out.size(); ++i) {
    const std::int64_t d = i % dim, s = i / dim % rows;
    const std::int64_t h = i / dim / rows % heads, b = i / dim / rows / heads;
    ASSERT_EQ(a[i], p[(b * rows + s) * width + h * dim + d]);
  }
}

TEST_P(Attention, DoesNotDependOnThreads) {
  const Case c = make_case(2, 4, 2, 60, 60, 32, true);
  const Array q = array(c.q), k = array(c.k), v = array(c.v),
              dout = array(c.dout);
  std::vector<Array> results;
  for (const int threads : {1, 3}) {
    with_threads(threads, [&] {
      Array out = array(q.size()), dq = array(q.size()), dk = array(k.size()),
            dv = array(k.size()), total(stat_dtype(dtype), 2 * 4 * 60);
      attention(context, dtype, c.args, q.data(), k.data(), v.data(),
                out.data(), total.data());
      attention_backward(context, dtype, c.args, c.grads, q.data(), k.data(),
                         v.data(), out.data(), dout.data(), total.data(),
                         dq.data(), dk.data(), dv.data());
      for (const Array& result : {out, dq, dk, dv}) results.push_back(result);
    });
  }
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(results[i] == results[i + 4]);
}

SB_OVER_FLOATING_DTYPES(Attention);

TEST(AttentionErrors, SayWhatDoesNotFit) {
  KernelContext context;
  double x[64] = {};
  Case c = make_case(1, 4, 3, 2, 2, 2, true);
  EXPECT_THROW(attention(context, DType::kF64, c.args, x, x, x, x, x), Error);
  c = make_case(1, 2, 2, 2, 2, 2, true);
  c.args.dropout = 0.5;
  EXPECT_THROW(attention(context, DType::kF64, c.args, x, x, x, x, x), Error);
  c.args.dropout_view = {{1, 2, 2, 2}, {1, 2, 2, 2}, {0, 1, 0, 0}, {}};
  EXPECT_THROW(attention(context, DType::kF64, c.args, x, x, x, x, x), Error);
  c.args.dropout_view = whole_view({1, 2, 2, 2});
  c.args.dropout = 1.0;
  EXPECT_THROW(attention(context, DType::kF64, c.args, x, x, x, x, x), Error);
}

}  // namespace
}  // namespace shardbook::kernels
