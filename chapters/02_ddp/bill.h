#pragma once

// What DDP costs a rank: the page's formulas.

#include <cstdint>
#include <optional>

#include "chapters/02_ddp/reducer.h"

namespace shardbook::ddp {

struct BillSizes {
  double ranks = 1;
  std::int64_t steps = 0;
  double elements = 0;       ///< of all parameters
  double tensors = 0;        ///< parameters
  double element_bytes = 0;  ///< of a parameter and its gradient
  /// Bytes of the buffer that the first weights travel in.
  double first_buffer_bytes = 0;
  /// Of a gradient's element on the wire, where it differs; 0: as it is.
  double wire_bytes = 0;
  DdpOptions ddp = {};
};
BillSizes bill_sizes(Module& module, const DdpOptions& ddp, int ranks,
                     std::int64_t steps, std::optional<DType> wire = {});

/// Bytes that a rank sends in these steps, construction included, without losses.
double predicted_bytes(const BillSizes& sizes);
/// Peak of buckets and messages on a rank; `sent_beside`: of messages of the
/// caller's own.
double communication_bytes(const BillSizes& sizes, double sent_beside);

}  // namespace shardbook::ddp
