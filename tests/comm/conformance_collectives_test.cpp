// The result of every collective, on every backend of this program.

#include <gtest/gtest.h>

#include <numeric>

#include "tests/comm/conformance_support.h"

namespace shardbook::conformance {
namespace {

std::string check_all_reduce(ProcessGroup& group) {
  return for_each_size([&](Findings& findings, DType dtype, std::int64_t n) {
    for (ReduceOp op : kOps) {
      Tensor x = mine(group, dtype, n);
      group.all_reduce(x, op).wait();
      findings.add(compare(x, reduced_by(group, op), "all_reduce"));
    }
  });
}

std::string check_reduce_scatter(ProcessGroup& group) {
  return for_each_size([&](Findings& findings, DType dtype, std::int64_t n) {
    for (ReduceOp op : kOps) {
      const Tensor input = mine(group, dtype, n * group.size());
      const auto expected = [&](std::int64_t i) {
        return reduced(group.size(), group.rank() * n + i, op);
      };
      const Tensor apart = Tensor::zeros({n}, {dtype, Device()});
      group.reduce_scatter(apart, input, op).wait();
      findings.add(compare(apart, expected, "reduce_scatter"));
      // In place: the output is this rank's piece of the input.
      const Tensor piece = input.flat_view(group.rank() * n, {n});
      group.reduce_scatter(piece, input, op).wait();
      findings.add(compare(piece, expected, "reduce_scatter in place"));
    }
  });
}

std::string check_all_gather(ProcessGroup& group) {
  return for_each_size([&](Findings& findings, DType dtype, std::int64_t n) {
    const auto expected = [&](std::int64_t i) {
      return value(static_cast<int>(i / n), i % n);
    };
    const Tensor input = mine(group, dtype, n);
    const Tensor output = Tensor::zeros({n * group.size()}, {dtype, Device()});
    group.all_gather(output, input).wait();
    findings.add(compare(output, expected, "all_gather"));
    findings.add(compare(input, values_of(group.rank()), "all_gather's input"));
    output.zero();
    const Tensor piece = output.flat_view(group.rank() * n, {n});
    piece.copy_from(input);
    group.all_gather(output, piece).wait();
    findings.add(compare(output, expected, "all_gather in place"));
  });
}

std::string check_broadcast_and_reduce(ProcessGroup& group) {
  return for_each_size([&](Findings& findings, DType dtype, std::int64_t n) {
    for (int root = 0; root < group.size(); ++root) {
      Tensor x = mine(group, dtype, n);
      group.broadcast(x, root).wait();
      findings.add(compare(x, values_of(root), "broadcast"));
      const ReduceOp op = kOps[static_cast<std::size_t>(root) % 3];
      x = mine(group, dtype, n);
      group.reduce(x, root, op).wait();
      findings.add(compare(
          x,
          [&](std::int64_t i) {
            return group.rank() == root ? reduced(group.size(), i, op)
                                        : value(group.rank(), i);
          },
          "reduce"));
    }
  });
}

std::string check_scatter_and_gather(ProcessGroup& group) {
  return for_each_size([&](Findings& findings, DType dtype, std::int64_t n) {
    for (int root = 0; root < group.size(); ++root) {
      const bool is_root = group.rank() == root;
      const std::int64_t whole = n * group.size();
      const Tensor all = is_root ? mine(group, dtype, whole) : Tensor();
      const Tensor piece = Tensor::zeros({n}, {dtype, Device()});
      group.scatter(piece, all, root).wait();
      findings.add(compare(
          piece,
          [&](std::int64_t i) { return value(root, group.rank() * n + i); },
          "scatter"));
      // And back, with this rank's own values.
      piece.copy_from(mine(group, dtype, n));
      group.gather(all, piece, root).wait();
      if (!is_root) continue;
      findings.add(compare(
          all,
          [&](std::int64_t i) { return value(static_cast<int>(i / n), i % n); },
          "gather"));
    }
  });
}

std::string check_all_to_all(ProcessGroup& group) {
  return for_each_size([&](Findings& findings, DType dtype, std::int64_t n) {
    const Tensor input = mine(group, dtype, n * group.size());
    const Tensor output = Tensor::zeros({n * group.size()}, {dtype, Device()});
    group.all_to_all(output, input).wait();
    findings.add(compare(
        output,
        [&](std::int64_t i) {
          return value(static_cast<int>(i / n), group.rank() * n + i % n);
        },
        "all_to_all"));
  });
}

// Rank s sends (s + 2 d) mod 5 elements times `scale` to rank d.
std::string check_all_to_all_v(ProcessGroup& group) {
  Findings findings;
  const int me = group.rank();
  for (DType dtype : kAllDTypes) {
    for (std::int64_t scale : {0, 1, 3, 2003}) {
      const auto count = [&](int s, int d) { return (s + 2 * d) % 5 * scale; };
      std::vector<std::int64_t> send;
      std::vector<std::int64_t> recv;
      for (int r = 0; r < group.size(); ++r) {
        send.push_back(count(me, r));
        recv.push_back(count(r, me));
      }
      const Tensor input =
          mine(group, dtype, std::accumulate(send.begin(), send.end(), 0LL));
      const Tensor output = Tensor::zeros(
          {std::accumulate(recv.begin(), recv.end(), 0LL)}, {dtype, Device()});
      group.all_to_all_v(output, input, send, recv).wait();
      std::vector<double> expected;
      for (int s = 0; s < group.size(); ++s) {
        std::int64_t begin = 0;
        for (int d = 0; d < me; ++d) begin += count(s, d);
        for (std::int64_t i = 0; i < count(s, me); ++i) {
          expected.push_back(value(s, begin + i));
        }
      }
      findings.add(compare(
          output,
          [&](std::int64_t i) { return expected[static_cast<std::size_t>(i)]; },
          "all_to_all_v"));
    }
  }
  return findings.text();
}

TEST_P(Conformance, AllReduceCombinesEveryElement) { expect(check_all_reduce); }
TEST_P(Conformance, ReduceScatterLeavesEachRankItsPiece) {
  expect(check_reduce_scatter);
}
TEST_P(Conformance, AllGatherLaysInputsEndToEnd) { expect(check_all_gather); }
TEST_P(Conformance, BroadcastAndReduceWorkForEveryRoot) {
  expect(check_broadcast_and_reduce);
}
TEST_P(Conformance, ScatterAndGatherWorkForEveryRoot) {
  expect(check_scatter_and_gather);
}
TEST_P(Conformance, AllToAllTransposesPieces) { expect(check_all_to_all); }
TEST_P(Conformance, AllToAllWithCountsMovesUnequalPieces) {
  expect(check_all_to_all_v);
}

}  // namespace
}  // namespace shardbook::conformance
