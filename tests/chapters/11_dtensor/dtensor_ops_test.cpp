// The layouts that operations choose, their costs, and the traps.

#include "chapters/11_dtensor/dtensor_ops.h"

#include <gtest/gtest.h>

#include <cmath>

#include "chapters/11_dtensor/propagation.h"
#include "tests/chapters/11_dtensor/dtensor_support.h"

namespace shardbook::dtensor_test {
namespace {

/// Layout of the result and calls of an operation, on a mesh of one axis.
std::string chosen(
    int ranks, const std::vector<Tensor>& wholes,
    const std::vector<Placement>& placements,
    const std::function<DTensor(const std::vector<DTensor>&)>& operation,
    const Tensor& expected) {
  return on_mesh({ranks}, [&](const Mesh& mesh, ProcessGroup& world) {
    std::vector<DTensor> operands;
    for (std::size_t i = 0; i < wholes.size(); ++i) {
      operands.push_back(cut_tensor(wholes[i], mesh, {replicate()})
                             .redistribute({placements[i]}));
    }
    world.clear_records();
    const DTensor y = operation(operands);
    const std::string log = log_since(world, 0);
    SB_CHECK(error_between(y.full_tensor(), expected) < 1e-12,
             "another result");
    return text(y.placements()[0]) + (log.empty() ? "" : " after " + log);
  })[0];
}

/// The same for an expression of both kinds of tensors.
template <typename Expression>
std::string chosen(int ranks, const Tensors& wholes,
                   const std::vector<Placement>& placements,
                   const Expression& expression) {
  return chosen(ranks, wholes, placements, expression, expression(wholes));
}

/// [6, 8] times [8, 4] on two ranks.
std::string product(const Placement& pa, const Placement& pb) {
  const Tensor a = noise({6, 8}, 1), b = noise({8, 4}, 2);
  return chosen(2, {a, b}, {pa, pb},
                [](const auto& x) { return matmul(x[0], x[1]); });
}

TEST(DTensorMatmul, ChoosesTheRuleWithTheFewestBytes) {
  const Placement r = replicate(), s0 = shard(0), s1 = shard(1), p = partial();
  EXPECT_EQ(product(r, r), "R");
  EXPECT_EQ(product(s0, r), "S(0)");
  EXPECT_EQ(product(r, s1), "S(1)");
  EXPECT_EQ(product(s1, s0), "P(sum)");
  EXPECT_EQ(product(p, r), "P(sum)");
  EXPECT_EQ(product(r, p), "P(sum)");
  // A replica is sliced where the slice matches
  EXPECT_EQ(product(s1, r), "P(sum)");
  EXPECT_EQ(product(r, s0), "P(sum)");
  // Half of a's cut moves to its columns, 12 elements; gathering b costs 16
  EXPECT_EQ(product(s0, s0), "P(sum) after all_to_all world 24");
  EXPECT_EQ(product(s1, s1), "P(sum) after all_to_all world 16");
  // Here both a and b would move: 12 + 8 elements
  EXPECT_EQ(product(s0, s1), "S(0) after all_gather world 32");
  // Two partials: reducing the smaller one is enough
  EXPECT_EQ(product(p, p), "P(sum) after all_reduce world 32");
}

// A product of maxima is not the maximum of products.
TEST(DTensorMatmul, KeepsPartialsOfSumsAndAveragesAlone) {
  const Placement r = replicate(), average = partial(PartialOp::kAvg);
  EXPECT_EQ(product(average, r), "P(avg)");
  EXPECT_EQ(product(r, average), "P(avg)");
  for (const PartialOp op : {PartialOp::kMax, PartialOp::kMin}) {
    EXPECT_EQ(product(partial(op), r), "S(0) after reduce_scatter world 48");
    EXPECT_EQ(product(r, partial(op)), "S(1) after reduce_scatter world 32");
  }
}

TEST(DTensorPointwise, LinearOperationsKeepPartials) {
  const Tensor a = noise({6, 4}, 1), b = noise({6, 4}, 2);
  const Placement r = replicate(), s0 = shard(0), s1 = shard(1), p = partial();
  const auto sum_of = [&](const Placement& pa, const Placement& pb) {
    return chosen(2, {a, b}, {pa, pb},
                  [](const auto& x) { return add(x[0], x[1]); });
  };
  EXPECT_EQ(sum_of(p, p), "P(sum)");
  EXPECT_EQ(sum_of(s0, r), "S(0)");
  EXPECT_EQ(sum_of(s0, s1), "S(0) after all_to_all world 12");
  // A replica counts once: first reduce the partial, the cheapest way
  EXPECT_EQ(sum_of(p, r), "S(0) after reduce_scatter world 24");
  EXPECT_EQ(sum_of(p, s1), "S(1) after reduce_scatter world 24");
  EXPECT_EQ(chosen(2, {a}, {p}, [](const auto& x) { return tanh(x[0]); }),
            "S(0) after reduce_scatter world 24");
  EXPECT_EQ(chosen(2, {a}, {s1}, [](const auto& x) { return gelu(x[0]); }),
            "S(1)");
  EXPECT_EQ(chosen(2, {a}, {p}, [](const auto& x) { return scale(x[0], 3); }),
            "P(sum)");
}

TEST(DTensorReduction, CutsOfTheReducedDimBecomePartials) {
  const Tensor a = noise({6, 4}, 1);
  const auto over = [&](bool is_mean, std::int64_t dim, const Placement& pa,
                        int ranks) {
    return chosen(ranks, {a}, {pa}, [&](const auto& x) {
      return is_mean ? mean(x[0], dim) : sum(x[0], dim);
    });
  };
  EXPECT_EQ(over(false, 0, shard(0), 2), "P(sum)");
  EXPECT_EQ(over(false, 0, shard(1), 2), "S(0)");
  EXPECT_EQ(over(false, 1, shard(0), 2), "S(0)");
  EXPECT_EQ(over(false, 1, partial(), 2), "P(sum)");
  EXPECT_EQ(over(true, 0, shard(0), 2), "P(avg)");
  EXPECT_EQ(over(true, 0, shard(0), 4), "P(sum)");  // 2 + 2 + 2 + 0 rows
  EXPECT_EQ(over(true, 1, partial(), 2), "P(sum)");
}

// Four ranks have 2, 2, 1 and 0 of 5 rows: the empty one must not win.
TEST(DTensorReduction, EmptyShardsNeverDecideAnExtreme) {
  const Tensor a = add_scalar(noise({5, 3}, 1), -100);
  const Tensor b = add_scalar(noise({5, 3}, 1), 100);
  const auto column = [](const Tensor& x, bool is_max) {
    const auto values = x.to_vector<double>();
    std::vector<double> best(values.begin(), values.begin() + 3);
    for (std::size_t i = 0; i < values.size(); ++i) {
      best[i % 3] = is_max ? std::max(best[i % 3], values[i])
                           : std::min(best[i % 3], values[i]);
    }
    return Tensor::from_values(best, {3});
  };
  EXPECT_EQ(chosen(
                4, {a}, {shard(0)}, [](const auto& x) { return max(x[0], 0); },
                column(a, true)),
            "P(max)");
  EXPECT_EQ(chosen(
                4, {b}, {shard(0)}, [](const auto& x) { return min(x[0], 0); },
                column(b, false)),
            "P(min)");
}

TEST(DTensorRows, TheNormalisedDimMustBeWhole) {
  const Tensor a = noise({6, 4}, 1);
  const auto soft = [&](const Placement& pa) {
    return chosen(2, {a}, {pa}, [](const auto& x) { return softmax(x[0]); });
  };
  EXPECT_EQ(soft(shard(0)), "S(0)");
  EXPECT_EQ(soft(shard(1)), "S(0) after all_to_all world 12");
}

TEST(DTensorEmbedding, RowsGiveTermsAndColumnsGiveShards) {
  const Tensor table = noise({5, 4}, 1);
  const Tensor ids =
      Tensor::from_values(std::vector<std::int64_t>{4, 0, 3, 1, 1, 2}, {6});
  const auto lookup = [&](const Placement& pt, const Placement& pi) {
    return chosen(4, {table, ids}, {pt, pi},
                  [](const auto& x) { return embedding(x[0], x[1]); });
  };
  EXPECT_EQ(lookup(shard(0), replicate()), "P(sum)");  // 2, 2, 1, 0 rows
  EXPECT_EQ(lookup(shard(1), replicate()), "S(1)");
  EXPECT_EQ(lookup(replicate(), shard(0)), "S(0)");
}

TEST(DTensorReshape, KeepsCutsOfTheOutermostDimOnly) {
  const Tensor a = noise({4, 6, 3}, 1);
  const auto to = [&](const Shape& shape, const Placement& pa, int ranks = 2) {
    return chosen(ranks, {a}, {pa},
                  [&](const auto& x) { return reshape(x[0], shape); });
  };
  EXPECT_EQ(to({24, 3}, shard(0)), "S(0)");
  EXPECT_EQ(to({24, 3}, shard(2)), "S(1)");
  // The inner of two merged dims, and cuts that do not divide
  EXPECT_EQ(to({24, 3}, shard(1)), "S(0) after all_to_all world 36");
  EXPECT_EQ(to({24, 3}, shard(0), 3), "S(1) after all_to_all world 36");
  EXPECT_EQ(to({4, 2, 3, 3}, shard(1)), "S(1)");
  EXPECT_EQ(to({4, 3, 2, 3}, shard(1)),
            "S(0) after all_to_all world 36");  // 3 factors over 2 ranks
  EXPECT_EQ(to({72}, partial()), "P(sum)");
}

/// Attention of four query heads to this many key heads.
std::string attend(std::int64_t kv_heads, const Placement& placement,
                   int ranks) {
  const Tensor q = noise({4, 5, 8}, 1), k = noise({4, 5, 2 * kv_heads}, 2),
               v = noise({4, 5, 2 * kv_heads}, 3);
  AttentionOptions options;
  options.heads = 4;
  options.kv_heads = kv_heads;
  return chosen(ranks, {q, k, v}, {placement, placement, placement},
                [&](const auto& x) {
                  return attention(x[0], x[1], x[2], options);
                })
      .substr(0, 21);
}

// Two query heads share a key head, so four ranks cannot have whole ones.
TEST(DTensorAttention, CutsTheBatchOrWholeHeadsWithTheirKeys) {
  EXPECT_EQ(attend(4, shard(2), 2), "S(2)");
  EXPECT_EQ(attend(4, shard(0), 2), "S(0)");
  EXPECT_EQ(attend(4, shard(1), 2), "S(0) after all_to_all");
  EXPECT_EQ(attend(2, shard(2), 2), "S(2)");
  EXPECT_EQ(attend(2, shard(2), 4), "S(0) after all_to_all");
}

/// The loss of logits whose rows are cut over the ranks.
std::string loss_of(int ranks, const std::vector<std::int64_t>& targets) {
  const auto rows = static_cast<std::int64_t>(targets.size());
  const Tensor logits = noise({rows, 4}, 1);
  const Tensor classes = Tensor::from_values(targets, {rows});
  return chosen(ranks, {logits, classes}, {shard(0), shard(0)},
                [](const auto& x) { return cross_entropy(x[0], x[1]); });
}

// Uneven rows, and one of two ranks without a counted target: the mean of means
// would be wrong or undefined.
TEST(DTensorLoss, CountsEveryTargetOnce) {
  const std::string calls = "P(sum) after all_reduce world 1";
  EXPECT_EQ(loss_of(2, {0, 3, 1, 2, 2}), calls);
  EXPECT_EQ(loss_of(4, {0, 3, 1, 2, 2}), calls);
  for (const int ranks : {1, 2, 4}) {
    loss_of(ranks, {-100, -100, -100, 1, -100, 2});
  }
}

// Loss parallel: logits stay where they are, in parts of 3, 2 or 1 classes.
TEST(DTensorLoss, ExchangesThreeNumbersPerRowWhereClassesAreCut) {
  const Tensor logits = noise({4, 5}, 1);
  const Tensor targets =
      Tensor::from_values(std::vector<std::int64_t>{4, -100, 0, 3}, {4});
  const Tensor whole = logits.clone();
  whole.set_requires_grad();
  const Tensor right = shardbook::cross_entropy(whole, targets);
  right.backward();
  const std::vector<Placements> layouts = {{shard(1)}, {shard(0), shard(1)}};
  for (const Placements& layout : layouts) {
    const std::vector<int> ranks = {3, 2};
    on_mesh(
        {ranks.end() - layout.size(), ranks.end()},
        [&](const Mesh& mesh, ProcessGroup& world) {
          Placements of_targets;
          for (const Placement& each : layout) {
            of_targets.push_back(each == shard(0) ? each : replicate());
          }
          const Tensor mine = cut_tensor(logits, mesh, layout).local().clone();
          mine.set_requires_grad();
          const Tensor loss =
              cross_entropy(from_local(mine, mesh, layout, logits.shape()),
                            cut_tensor(targets, mesh, of_targets))
                  .full_tensor();
          const std::size_t forward = world.records().size();
          loss.backward();
          SB_CHECK(error_between(loss, right) < 1e-12, "loss");
          SB_CHECK(error_between(
                       mine.grad(),
                       cut_tensor(whole.grad(), mesh, layout).local()) < 1e-12,
                   "gradient");
          SB_CHECK(world.records().size() == forward, "backward sends");
          for (const CommRecord& record : world.records()) {
            SB_CHECK(record.numel <= 4, record_text(record));
          }
        });
  }
}

TEST(DTensorDropout, DrawsTheMaskOfOneDeviceInEveryLayout) {
  const Tensor a = noise({6, 4}, 1);
  const Tensor expected = shardbook::dropout(a, 0.5);
  on_mesh({2, 2}, [&](const Mesh& mesh, ProcessGroup&) {
    for (const Placements& placements :
         all_placements({replicate(), shard(0), shard(1)}, 2)) {
      RankContext::current().random = RandomState();
      const DTensor y = dropout(cut_tensor(a, mesh, placements), 0.5);
      SB_CHECK(bitwise_equal(y.full_tensor(), expected), text(placements));
    }
  });
}

TEST(DTensorOpsErrors, NameTheOperation) {
  const std::string meshes = error_on_ranks(4, [](ProcessGroup& world) {
    DeviceMesh devices(world, Topology({"dp", "tp"}, {2, 2}));
    const Tensor x = Tensor::zeros({4, 4});
    add(cut_tensor(x, Mesh(devices, {"dp"}), {shard(0)}),
        cut_tensor(x, Mesh(devices, {"tp"}), {shard(0)}));
  });
  expect_text(meshes, {"add: operands on the meshes dp=2 and tp=2; use one "
                       "mesh"});
  const std::string sizes =
      error_on_mesh({2}, [](const Mesh& mesh, ProcessGroup&) {
        matmul(cut_tensor(Tensor::zeros({4, 3}), mesh, {replicate()}),
               cut_tensor(Tensor::zeros({4, 3}), mesh, {replicate()}));
      });
  expect_text(sizes, {"matmul: [4, 3] times [4, 3] sums over 3 and 4"});
}

}  // namespace
}  // namespace shardbook::dtensor_test
