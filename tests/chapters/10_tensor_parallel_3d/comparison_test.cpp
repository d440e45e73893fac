// One layer in 1D, 2D, 2.5D and 3D: counts of the runs against the formulas of
// the four pages, and the numbers of tokens where two ways are equal.

#include "chapters/10_tensor_parallel_3d/tensor_parallel_comparison.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "chapters/08_tensor_parallel_2d/bill.h"
#include "chapters/10_tensor_parallel_3d/bill.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/support/errors.h"

namespace shardbook::comparison_test {
namespace {

using cube::Compared;
using cube::ComparedLayer;
using cube::Comparison;
using cube::Cost;
using cube::Kind;
using cube::Lead;
using cube::Way;

/// The tables of the pages, for one layer without embedding and head.
struct Page {
  ComparedLayer layer;
  Way way;
  double e = 4;  ///< bytes of an element; of a statistic: 4

  double h() const { return static_cast<double>(layer.h); }
  double heads() const { return static_cast<double>(layer.heads); }
  double q() const { return way.side; }
  double d() const { return way.depth; }

  /// [K, N] of the linear layers.
  std::vector<std::pair<double, double>> linears() const {
    std::vector<std::pair<double, double>> sizes;
    if (!layer.is_mlp) {
      sizes.emplace_back(h(), 3 * h());
      sizes.emplace_back(h(), h());
    }
    sizes.emplace_back(h(), 4 * h());
    sizes.emplace_back(4 * h(), h());
    return sizes;
  }
  /// N of the biases, and of the norms' gains and biases.
  std::vector<double> vectors() const {
    std::vector<double> sizes;
    for (const auto& [k, n] : linears()) sizes.push_back(n);
    if (!layer.is_mlp) sizes.insert(sizes.end(), 4, h());
    return sizes;
  }
  double norms() const { return layer.is_mlp ? 0 : 2; }
  double matrix_elements() const { return (layer.is_mlp ? 8 : 12) * h() * h(); }
  double vector_elements() const { return (layer.is_mlp ? 5 : 13) * h(); }

  double sent_bytes(double tokens) const {
    const double p = way.ranks, s = 4;
    double bytes = 0;
    if (way.kind == Kind::k1D) {
      return (layer.is_mlp ? 2 : 4) * 2 * (p - 1) / p * tokens * h() * e;
    }
    if (way.kind == Kind::k3D) {
      const double l = q();
      for (const auto& [k, n] : linears()) {
        bytes += cube::linear_elements(l, tokens, k, n) * e;
      }
      for (const double n : vectors()) {
        bytes += 2 * (l * l - 1) / (l * l) * n / l * e;
      }
      return bytes + norms() * 2 * 2 * (l - 1) / l * 2 * tokens / (l * l) * s;
    }
    const double each = (q() - 1) / (q() * q());
    for (const auto& [k, n] : linears()) {
      bytes += summa::linear_elements(q(), d(), tokens, k, n) * e;
    }
    for (const double n : vectors()) {
      bytes += (2 * each * n + 2 * (d() - 1) / d() * n / (q() * q())) * e;
    }
    return bytes +
           norms() * 2 * 2 * (q() - 1) / q() * 2 * tokens / (d() * q()) * s;
  }

  double weight_bytes() const {
    if (way.kind == Kind::k1D) {
      // Norms, and the biases of row layers, are on every rank
      const double whole = layer.is_mlp ? h() : 6 * h();
      return ((matrix_elements() + vector_elements() - whole) / way.ranks +
              whole) *
             e;
    }
    if (way.kind == Kind::k3D) {
      return (matrix_elements() / (q() * q() * q()) + vector_elements() / q()) *
             e;
    }
    return (matrix_elements() + vector_elements()) / (q() * q()) * e;
  }

  double kept_bytes(double tokens) const {
    const double t = way.ranks, s = 4;
    if (way.kind == Kind::k1D) {
      return layer.is_mlp
                 ? tokens * (1 + 8 / t) * h() * e
                 : tokens * ((4 + 12 / t) * h() * e + (4 + heads() / t) * s);
    }
    // A rank's rows n and columns w
    const bool is_cube = way.kind == Kind::k3D;
    const double n = tokens / (is_cube ? q() * q() : d() * q());
    const double w = h() / q();
    const double own = layer.is_mlp
                           ? 9 * n * w * e
                           : n * (16 * w * e + (4 + heads() / q()) * s);
    if (!is_cube) return own + vector_elements() / q() * e;
    const double read = layer.is_mlp ? 5 : 7;
    return own + (read * tokens * h() + matrix_elements()) / (q() * q()) * e;
  }
};

Options on_textbook(DType dtype = DType::kF32) {
  Options options;
  options.cluster = "textbook";
  options.dtype = dtype;
  return options;
}

double bytes_of(DType dtype) { return static_cast<double>(dtype_bytes(dtype)); }

TEST(ComparisonWays, AreAllThatTheRanksAllow) {
  const auto names = [](int ranks) {
    std::string text;
    for (const Way& way : cube::ways_for(ranks)) {
      text += cube::way_name(way) + "; ";
    }
    return text;
  };
  EXPECT_EQ(names(4), "1D; 2D; ");
  EXPECT_EQ(names(8), "1D; 2.5D d=2; 3D; ");
  EXPECT_EQ(names(16), "1D; 2D; 2.5D d=4; ");
  EXPECT_EQ(names(64), "1D; 2D; 2.5D d=4; 2.5D d=16; 3D; ");
}

TEST(ComparisonCosts, EqualTheFormulasOfThePages) {
  int compared = 0;
  for (const bool is_mlp : {false, true}) {
    for (const std::int64_t h : {192, 256, 320}) {
      const DType dtype = h == 256 ? DType::kBF16 : DType::kF32;
      ComparedLayer layer;
      layer.is_mlp = is_mlp;
      layer.h = h;
      layer.tokens_over_h = {1, 3};
      const Comparison all = cube::compare(on_textbook(dtype), layer);
      for (const Compared& one : all.ways) {
        const Page page{layer, one.way, bytes_of(dtype)};
        for (std::size_t i = 0; i < one.costs.size(); ++i) {
          SCOPED_TRACE(testing::Message()
                       << cube::way_name(one.way) << " on " << one.way.ranks
                       << ", h " << h << ", mlp " << is_mlp);
          const double tokens = layer.tokens_over_h[i] * page.h();
          const Cost& cost = one.costs[i];
          EXPECT_NEAR(cost.sent_bytes / page.sent_bytes(tokens), 1, 1e-12);
          EXPECT_DOUBLE_EQ(cost.weight_bytes, page.weight_bytes());
          EXPECT_DOUBLE_EQ(cost.kept_bytes, page.kept_bytes(tokens));
          ++compared;
        }
      }
    }
  }
  EXPECT_EQ(compared, 2 * 3 * 13 * 2);
}

// At each change of the leading way, both formulas give the same bytes; in
// between, no other way sends fewer.
TEST(ComparisonLeads, ChangeWhereTheFormulasAreEqual) {
  for (const bool is_mlp : {false, true}) {
    ComparedLayer layer;
    layer.is_mlp = is_mlp;
    const Comparison all = cube::compare(on_textbook(DType::kBF16), layer);
    for (const int ranks : layer.ranks) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, mlp " << is_mlp);
      const auto bytes = [&](const Way& way, double tokens) {
        return Page{layer, way, 2}.sent_bytes(tokens);
      };
      const std::vector<Lead> leads = cube::leads(all, ranks);
      ASSERT_FALSE(leads.empty());
      EXPECT_EQ(leads[0].way.kind, Kind::k1D);  // It sends no weights
      for (std::size_t i = 0; i < leads.size(); ++i) {
        const double from = leads[i].tokens;
        if (i > 0) {
          EXPECT_NEAR(bytes(leads[i].way, from) / bytes(leads[i - 1].way, from),
                      1, 1e-9);
        }
        const double to =
            i + 1 < leads.size() ? leads[i + 1].tokens : from + 1e6;
        const double between = (from + to) / 2;
        for (const Way& way : cube::ways_for(ranks)) {
          EXPECT_LE(bytes(leads[i].way, between), bytes(way, between));
        }
      }
    }
  }
}

// With products alone: 8 ranks, T = h for a block and T = 2h for its MLP.
TEST(ComparisonLeads, OfACubeOfEightBeginAtThePagesNumberOfTokens) {
  for (const bool is_mlp : {false, true}) {
    ComparedLayer layer;
    layer.is_mlp = is_mlp;
    layer.ranks = {8};
    const std::vector<Lead> leads =
        cube::leads(cube::compare(on_textbook(), layer), 8);
    ASSERT_GE(leads.size(), 2u);
    EXPECT_EQ(leads[1].way.kind, Kind::k3D);
    const double tokens_over_h = leads[1].tokens / static_cast<double>(layer.h);
    EXPECT_NEAR(tokens_over_h / (is_mlp ? 2 : 1), 1, 5e-3);
  }
}

// The closed form of a block in 1D, from its page.
TEST(ComparisonTime, OfABlockIn1DIsThatOfThePage) {
  using namespace textbook;
  ComparedLayer layer;
  layer.h = 256;
  layer.tokens_over_h = {2};
  const Comparison all = cube::compare(on_textbook(), layer);
  for (const Compared& one : all.ways) {
    if (one.way.kind != Kind::k1D) continue;
    const double t = one.way.ranks, h = 256, tokens = 512, seq = 512.0 / 64;
    const double product = 2 * tokens * h * h / t / kRate;
    const double c = 3 * product, p = product, f = 4 * product, g = 4 * product;
    const double k = 2 * tokens * (seq + 1) * h / t / kRate;
    const double a = all_reduce(one.way.ranks, 4 * tokens * h);
    const double forward = c + k + p + a + f + g + a;
    const double backward =
        2 * g + f + std::max(f, a) + 2 * p + 2.5 * k + c + std::max(c, a);
    expect_time(one.costs[0].time_s, forward + backward);
  }
}

TEST(ComparisonText, MarksTheLeastOfItsRanks) {
  Comparison all;
  all.layer.tokens_over_h = {0.5, 1};
  all.layer.ranks = {4};
  const double mib = 1024 * 1024;
  const auto cost = [&](double kept, double sent) {
    return Cost{mib, kept * mib, sent * mib, sent * 1e-3};
  };
  all.ways = {{{Kind::k1D, 4, 4, 1}, {cost(8, 2), cost(16, 4)}},
              {{Kind::k2D, 4, 2, 1}, {cost(4, 2.5), cost(8, 3)}}};
  const std::string text = cube::comparison_text(all);
  expect_text(text, {"4  1D                 1.0    8.0     16.0      2.0 *    "
                     "4.0     2.00 *   4.00\n",
                     "4  2D                 1.0    4.0 *    8.0 *    2.5      "
                     "3.0 *   2.50     3.00 *\n"});
  // 4x and 2 + x are equal at x = 2/3
  expect_text(text, {"4  1D, from bs = 0.67 h on 2D\n"});
}

}  // namespace
}  // namespace shardbook::comparison_test
