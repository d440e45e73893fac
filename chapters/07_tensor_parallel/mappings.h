#pragma once

// The conjugate operators of tensor parallelism: what moves at the border
// between activations that every rank has and activations that are cut.
//
//   operator            forward               backward
//   copy_to (f)         nothing               all_reduce
//   reduce_from (g)     all_reduce            nothing
//   scatter_to          own part              all_gather
//   gather_from         all_gather            own part
//   reduce_scatter_to   reduce_scatter        all_gather
//
// Each backward follows from what the ranks do with the result, not from the
// forward alone: behind reduce_from every rank computes the same, so the gradient
// that arrives is already the whole one, and adding the ranks' would count it P
// times. All of them do nothing in a group of one.
// Shoeybi et al. 2019, "Megatron-LM", section 3; Korthikanti et al. 2022,
// "Reducing Activation Recomputation", section 4.2.

#include "comm/process_group.h"
#include "core/ops.h"

namespace shardbook::tensor_parallel {

/// Where a part is cut from a tensor whose dimension `dim` (negative: from the
/// last) has equal parts on the ranks of a group.
struct Cut {
  std::int64_t dim = -1;
};

/// f: x as it is; gradients of the ranks are added.
Tensor copy_to(const Tensor& x, ProcessGroup& group);
/// g: the sum of the ranks' x, computed in x's own array; nothing may need x
/// afterwards. The gradient is passed on as it is.
Tensor reduce_from(const Tensor& x, ProcessGroup& group);
/// This rank's part of x, which all ranks have.
Tensor scatter_to(const Tensor& x, ProcessGroup& group, Cut cut = {});
/// The ranks' parts, one after another.
Tensor gather_from(const Tensor& x, ProcessGroup& group, Cut cut = {});
/// gather_from whose result goes into work that is cut over the ranks, so that
/// gradients are parts of sums: backward is a reduce_scatter.
Tensor gather_to_parallel(const Tensor& x, ProcessGroup& group, Cut cut);
/// This rank's part of the sum of the ranks' x.
Tensor reduce_scatter_to(const Tensor& x, ProcessGroup& group, Cut cut);

// The same movements without gradients. `label` names them in the ledger.

/// [.., P n, ..] from the ranks' [.., n, ..], one after another.
Tensor all_gather(const Tensor& x, ProcessGroup& group, Cut cut,
                  const char* label);
/// [.., n / P, ..] from [.., n, ..].
Tensor reduce_scatter(const Tensor& x, ProcessGroup& group, Cut cut,
                      const char* label);

/// For `linear`: sums the gradient of its input over the group, while the
/// gradient of its weight is computed.
InputGradientHook sum_input_gradients(ProcessGroup& group);

/// The length of one of P equal parts; throws Error that names the sizes which
/// would work.
std::int64_t exact_part(std::int64_t length, int parts, const char* what);

}  // namespace shardbook::tensor_parallel
