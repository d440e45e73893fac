#pragma once

// A tensor's storage, for strategies that decide where values and gradients lie.
//
// ZeRO and FSDP keep parameters as views of one flat array, and release it while
// no layer needs it; DDP lets gradients lie in the buckets that it sends.
//
//   set_data(weight, flat.flat_view(0, weight.shape()));
//   release_storage(flat);    // weight has a shape, and no values
//   restore_storage(flat);    // until a gather has filled it again

#include "core/tensor.h"

namespace shardbook {

/// Makes the tensor another view: its array becomes `source`'s (same numel and
/// dtype).
void set_data(const Tensor& tensor, const Tensor& source);
/// Frees the storage's memory, for all views of it; contents are lost.
void release_storage(const Tensor& tensor);
/// Allocates it again, not initialised. The tensor must cover the storage.
void restore_storage(const Tensor& tensor);

/// The first gradient after each clear_grad is written into `buffer` (same
/// shape, or undefined for none), so that gradients lie where communication
/// wants them.
void set_grad_buffer(const Tensor& tensor, const Tensor& buffer);

MemoryKind memory_kind_of(const Tensor& tensor);
/// Books the whole storage under another kind. Returns the tensor.
const Tensor& set_memory_kind(const Tensor& tensor, MemoryKind kind);

/// Marks this result of an operation as a stand-in for a parameter (a replica's
/// copy): the memory of its gradient is booked as a gradient.
void set_stands_for_parameter(const Tensor& tensor);
bool stands_for_parameter(const Tensor& tensor);

}  // namespace shardbook
