#pragma once

// The conformance suite's values and comparisons, and its fixture, which runs a
// check on every backend of the program.
//
// Values are small integers, of which sums are exact in every dtype and order.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "tests/comm/worlds.h"
#include "tests/support/dtypes.h"

namespace shardbook::conformance {

using test::RankBody;
using test::World;

inline const std::vector<ReduceOp> kOps = {ReduceOp::kSum, ReduceOp::kMax,
                                           ReduceOp::kMin};
// Elements per rank: none, one, primes; where a call is cut into tasks, or sent
// in several segments, also a size that leaves an incomplete piece at the end.
inline std::vector<std::int64_t> sizes(DType dtype) {
  if (dtype == DType::kF32) return {0, 1, 7, 64, 1009, 70001};
  return {0, 1, 7, 1009};
}

inline double value(int rank, std::int64_t i) {
  return static_cast<double>((i * 7 + rank * 13 + (i / 17) * rank) % 17 - 8);
}

using Formula = std::function<double(std::int64_t)>;

// The values of one rank, and one value everywhere.
inline Formula values_of(int rank) {
  return [rank](std::int64_t i) { return value(rank, i); };
}
inline Formula constant(double value) {
  return [value](std::int64_t) { return value; };
}

inline Tensor make(DType dtype, std::int64_t n, const Formula& formula) {
  std::vector<double> values(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    values[static_cast<std::size_t>(i)] = formula(i);
  }
  Tensor result = Tensor::empty({n}, {dtype, Device()});
  result.copy_from(Tensor::from_values<double>(values, {n}));
  return result;
}

inline Tensor mine(const ProcessGroup& group, DType dtype, std::int64_t n) {
  return make(dtype, n, values_of(group.rank()));
}

// The first element that differs from the formula; empty if none does.
inline std::string compare(const Tensor& tensor, const Formula& formula,
                           const std::string& what) {
  const std::vector<double> values = tensor.to_vector<double>();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double expected = formula(static_cast<std::int64_t>(i));
    if (values[i] == expected) continue;
    std::ostringstream text;
    text << what << " " << dtype_name(tensor.dtype()) << "[" << values.size()
         << "]: element " << i << " is " << values[i] << ", expected "
         << expected;
    return text.str();
  }
  return std::string();
}

inline double reduced(int num_ranks, std::int64_t i, ReduceOp op) {
  double result = value(0, i);
  for (int r = 1; r < num_ranks; ++r) {
    const double next = value(r, i);
    if (op == ReduceOp::kSum) result += next;
    if (op == ReduceOp::kMax) result = std::max(result, next);
    if (op == ReduceOp::kMin) result = std::min(result, next);
  }
  return result;
}

// What all ranks have after an all-reduce of `mine`.
inline Formula reduced_by(const ProcessGroup& group,
                          ReduceOp op = ReduceOp::kSum) {
  return [size = group.size(), op](std::int64_t i) {
    return reduced(size, i, op);
  };
}

// Runs checks until one finds an error.
class Findings {
 public:
  void add(const std::string& wrong) {
    if (text_.empty()) text_ = wrong;
  }
  void require(bool condition, const std::string& text) {
    if (!condition) add(text);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Runs a check for each dtype and size; returns its first finding.
template <typename Check>
std::string for_each_size(Check check) {
  Findings findings;
  for (DType dtype : kAllDTypes) {
    for (std::int64_t n : sizes(dtype)) check(findings, dtype, n);
  }
  return findings.text();
}

struct Case {
  World world;
  int world_size;
};

class Conformance : public ::testing::TestWithParam<Case> {
 protected:
  void expect(const RankBody& body) {
    if (GetParam().world.why_not != nullptr) {
      const std::string reason =
          GetParam().world.why_not(GetParam().world_size);
      if (!reason.empty()) GTEST_SKIP() << reason;
    }
    std::vector<std::string> results;
    ASSERT_NO_THROW(results =
                        GetParam().world.run(GetParam().world_size, body));
    ASSERT_EQ(results.size(), static_cast<std::size_t>(GetParam().world_size));
    for (std::size_t r = 0; r < results.size(); ++r) {
      EXPECT_EQ(results[r], "") << "on rank " << r;
    }
  }
};

}  // namespace shardbook::conformance
