#pragma once

// On which device the parity tests run: parity_emulated.cpp or
// parity_device.cpp is linked.

namespace shardbook::parity {

/// Called before the first use of a device: which library core loads.
void choose_library();
/// The orders of threads, blocks and streams to try; 0 is the usual one.
int num_orders();
void choose_order(int order);

}  // namespace shardbook::parity
