#include "core/kernels/cpu/plans.h"

#include <memory>

namespace shardbook {

KernelContext::Plans& KernelContext::plans() {
  if (!plans_) plans_ = std::make_shared<Plans>();
  return *plans_;
}

}  // namespace shardbook
