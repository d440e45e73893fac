#pragma once

// Which layouts an operation can compute on, and which of them to choose.
//
// A rule holds for one axis of the mesh: placements of the operands, and the
// placement that the local results then have. A product [M, K] x [K, N] has
//
//   (R, R) -> R   (S(0), R) -> S(0)   (R, S(1)) -> S(1)   (S(1), S(0)) -> P
//
// Every axis has a rule, and the operands are brought to the layouts of these
// rules. The choice is the one whose redistribution puts the fewest bytes on the
// wire; among equals, the one that changes the fewest operands, then the one
// listed first. A rule with a partial operand applies only where the operand is
// that partial already: a replica is not taken apart.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "chapters/11_dtensor/dtensor.h"
#include "core/ops.h"

namespace shardbook::dtensor {

struct Rule {
  Placements operands;
  Placement result;
};

/// The layouts to compute on.
struct Choice {
  std::vector<Placements> operands;
  Placements result;
  double wire_bytes = 0;  ///< of the rank at coordinate 0, as ranks must agree
};

/// `is_valid` may refuse combinations of axes (nested cuts that do not divide).
/// Throws Error with the operation's name where no rule applies, and for operands of
/// two meshes.
Choice propagate(const std::string& name, const std::vector<DTensor>& operands,
                 const std::vector<Rule>& rules,
                 const std::function<bool(const Choice&)>& is_valid = nullptr);

/// Brings the operands to their layouts, computes on the local arrays, and
/// wraps the result. Backward brings the result's gradient to the layout that
/// the local backward needs. A shard's gradient is a shard; a replica's is a
/// term of a sum if its ranks computed different parts.
DTensor compute(const std::string& name, const std::vector<DTensor>& operands,
                const Choice& choice, const Shape& result_shape,
                const std::function<Tensor(const Tensors&)>& function);

/// The same on the layouts that propagate chooses.
DTensor compute(const std::string& name, const std::vector<DTensor>& operands,
                const std::vector<Rule>& rules, const Shape& result_shape,
                const std::function<Tensor(const Tensors&)>& function);

/// Replicas of all operands; or the first operand cut along one of its first `dims`
/// dims, the others whole.
std::vector<Rule> rules_of_rows(std::int64_t dims, std::size_t operands = 1);
/// Adds rules: sums (averages) of all operands give a sum (average).
void keep_terms(std::vector<Rule>& rules, std::size_t operands = 1);

/// Counted from the front. Throws Error for a dim that x does not have.
std::int64_t positive_dim(const char* name, const DTensor& x, std::int64_t dim);
/// Ranks that cut `dim` under these placements, all axes together.
std::int64_t num_cuts(const Placements& placements, const Shape& mesh,
                      std::int64_t dim);

}  // namespace shardbook::dtensor
