#pragma once

// The conjugate operators of tensor parallelism: messages at the border between
// whole and cut activations.
//
//   operator            forward               backward
//   copy_to (f)         nothing               all_reduce
//   reduce_from (g)     all_reduce            nothing
//   scatter_to          own part              all_gather
//   gather_from         all_gather            own part
//   reduce_scatter_to   reduce_scatter        all_gather
//
// Each backward follows from what the ranks do with the result, not from the
// forward alone: after reduce_from every rank computes the same, so the
// arriving gradient is already whole, and a sum over the ranks would count it P
// times. In a group of one, all operators do nothing.
// Shoeybi et al. 2019, "Megatron-LM", section 3; Korthikanti et al. 2022,
// "Reducing Activation Recomputation", section 4.2.

#include "comm/process_group.h"
#include "core/ops.h"

namespace shardbook::tensor_parallel {

/// The cut dimension of a tensor, in equal parts on the ranks of a group;
/// negative `dim` counts from the last.
struct Cut {
  std::int64_t dim = -1;
};

/// f: returns x unchanged; backward sums gradients over the ranks.
Tensor copy_to(const Tensor& x, ProcessGroup& group);
/// g: the sum of the ranks' x, computed in place in x, which must not be used
/// afterwards. The gradient is passed on unchanged.
Tensor reduce_from(const Tensor& x, ProcessGroup& group);
/// This rank's part of x, which all ranks have.
Tensor scatter_to(const Tensor& x, ProcessGroup& group, Cut cut = {});
/// The ranks' parts, one after another.
Tensor gather_from(const Tensor& x, ProcessGroup& group, Cut cut = {});
/// gather_from for results used in work that is cut over the ranks: gradients
/// are partial sums, so backward is a reduce_scatter.
Tensor gather_to_parallel(const Tensor& x, ProcessGroup& group, Cut cut);
/// This rank's part of the sum of the ranks' x.
Tensor reduce_scatter_to(const Tensor& x, ProcessGroup& group, Cut cut);

// The same operations without gradients. `label` names them in the ledger.

/// [.., P n, ..] from the ranks' [.., n, ..], one after another.
Tensor all_gather(const Tensor& x, ProcessGroup& group, Cut cut,
                  const char* label);
/// [.., n / P, ..] from [.., n, ..].
Tensor reduce_scatter(const Tensor& x, ProcessGroup& group, Cut cut,
                      const char* label);

/// For `linear`: sums the gradient of its input over the group, while the
/// gradient of its weight is computed.
InputGradientHook sum_input_gradients(ProcessGroup& group);

/// The length of one of P equal parts; throws Error that names sizes that work.
std::int64_t exact_part(std::int64_t length, int parts, const char* what);

}  // namespace shardbook::tensor_parallel
