// A build without kernels for the CPU, for runs on shapes: the other kernels
// throw (kernel.h). Ranks that keep virtual time still compare their clocks.

#include <algorithm>

#include "core/check.h"
#include "core/kernels/combine.h"

namespace shardbook::kernels::cpu {

void combine(KernelContext&, DType dtype, ReduceKind op, std::int64_t n,
             const std::vector<const void*>& inputs,
             const std::vector<void*>& outputs) {
  SB_CHECK(dtype == DType::kF64, "kernels: combine of ", dtype_name(dtype),
           " has no version for the CPU in this build");
  for (std::int64_t i = 0; i < n; ++i) {
    double sum = static_cast<const double*>(inputs[0])[i];
    for (std::size_t k = 1; k < inputs.size(); ++k) {
      const double next = static_cast<const double*>(inputs[k])[i];
      sum = op == ReduceKind::kSum   ? sum + next
            : op == ReduceKind::kMax ? std::max(sum, next)
                                     : std::min(sum, next);
    }
    for (void* output : outputs) static_cast<double*>(output)[i] = sum;
  }
}

}  // namespace shardbook::kernels::cpu
