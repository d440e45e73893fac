#pragma once

// What crosses from the first device to the second, and its gradient back.

#include "comm/device_copies.h"
#include "core/tensor.h"

namespace shardbook::model_parallel {

/// A copy of `x` on another device. Differentiable: the gradient is copied
/// back. Both copies are booked, as a message from device to device.
///
/// Each device's part of a graph runs backward on a thread of its own. That of
/// `to` copies the gradient when it has it, and goes on; that of x's device
/// waits for it there, and nowhere else. The gradient's place on x's device is
/// taken now, so that the other thread never asks this device for memory.
///
/// Communication: x.numel() elements forward, and the same backward.
Tensor cross(const Tensor& x, const Device& to, const SharedLedger& ledger);

/// The same for what has no gradient (labels): booked as input.
Tensor send_labels(const Tensor& labels, const Device& to,
                   const SharedLedger& ledger);

}  // namespace shardbook::model_parallel
