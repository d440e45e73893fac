#pragma once

// Copies activations from the first device to the second, and gradients back.

#include "comm/device_copies.h"
#include "core/tensor.h"

namespace shardbook::model_parallel {

/// Returns a copy of `x` on another device. Differentiable: backward copies the
/// gradient back. The ledger records each copy as a message between devices.
///
/// Each device's part of a graph runs backward on its own thread. The thread of
/// `to` copies the gradient as soon as it is computed, and goes on; the thread
/// of x's device waits for this copy and for nothing else. The memory for the
/// gradient is allocated in forward, so that the thread of `to` never allocates
/// memory on x's device.
///
/// Communication: x.numel() elements forward, and the same backward.
Tensor cross(const Tensor& x, const Device& to, const SharedLedger& ledger);

/// Copies labels, which have no gradient; their memory counts as input.
Tensor send_labels(const Tensor& labels, const Device& to,
                   const SharedLedger& ledger);

}  // namespace shardbook::model_parallel
