#pragma once

// Bytes and elements between the host and devices. Observers are told by the
// operation that copies, not here. Read by core/ and comm/ only.

#include "core/tensor.h"

namespace shardbook::internal {

/// All bytes of the tensor become zero, in the order of the current stream.
void zero_bytes(const Tensor& tensor);

/// `from`, the tensor's bytes in host memory, may change after the call.
void write_from_host(const Tensor& to, const void* from);

/// Waits for the current stream's work, then copies the tensor's bytes; throws
/// the error that a kernel has found.
void read_to_host(void* to, const Tensor& from);

/// to[i] = from[i], of any dtypes and devices with values, in the order of the
/// current stream (of both devices' streams of that number, if there are two).
/// Between the host and a GPU the copy is complete when the call returns, and
/// dtypes are converted on the host.
void copy_elements(const Tensor& to, const Tensor& from);

/// The elements in the memory of the host: the tensor itself unless it lies on
/// a GPU.
Tensor on_host(const Tensor& tensor);

}  // namespace shardbook::internal
