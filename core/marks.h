#pragma once

// Marks: what a tensor's array means to the code that made it.
//
// The same shape may lie over ranks in two ways, and a sum of one of each would
// be a number without meaning. A chapter gives each layout a mark. Views keep
// it, element-wise operations, swiglu and dropout pass it on, and two operands with
// different marks are an Error. Other operations make tensors without a mark;
// core knows nothing else about them.

#include "core/tensor.h"

namespace shardbook {

/// Marks a tensor; 0 takes the mark away. Returns the tensor.
const Tensor& set_mark(const Tensor& tensor, int mark);
/// 0 where there is none.
int mark_of(const Tensor& tensor);

}  // namespace shardbook
