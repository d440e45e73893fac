#pragma once

// Ownership of the objects of CUDA's libraries.

#include <memory>
#include <type_traits>

namespace shardbook::kernels::cuda {

template <auto kDestroy>
struct Destroy {
  template <typename T>
  void operator()(T* x) const {
    kDestroy(x);
  }
};

/// Owner<cudnnHandle_t, cudnnDestroy>: a unique_ptr for a handle.
template <typename Handle, auto kDestroy>
using Owner = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<kDestroy>>;

}  // namespace shardbook::kernels::cuda
