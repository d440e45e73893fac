#pragma once

// Callbacks at the end of a backward, however it ends.

#include <functional>

namespace shardbook::autograd {

/// Calls `ended` when the backward that is running on this thread has run to
/// its end, or `failed` when an exception leaves it (also one of `ended`).
/// `failed` must not throw.
void on_end_of_backward(std::function<void()> ended,
                        std::function<void()> failed);

}  // namespace shardbook::autograd
