#pragma once

// Kernels: the loops under every operation, on raw pointers.
//
// A kernel knows nothing of tensors, gradients or ranks. It takes a
// KernelContext, an element type, sizes and pointers:
//
//   KernelContext context;
//   MatmulArgs args;
//   args.m = 64, args.n = 32, args.k = 16;
//   kernels::matmul(context, DType::kF32, args, a, b, c);
//
// kernels/kernel.h explains how one name stands for a kernel on every type of
// device; cpu/ and cuda/ hold them.
//
// What is guaranteed:
// - Results do not depend on the number of OpenMP threads (products of oneDNN
//   may, see matmul.h; none is used in deterministic mode).
// - 16-bit elements are widened to f32, computed, and rounded to nearest even
//   when stored; f64 is computed in f64.
// - One context serves one thread at a time; nothing else is shared, so any
//   number of ranks may run as threads, each with its own context.
// - Arrays are contiguous unless strides are given; strides count elements, not
//   bytes. Sizes of zero are legal.
// - Outputs may be the same array as an input only where documented.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/device_type.h"
#include "core/dtype.h"

namespace shardbook {

namespace kernels {
/// The largest number of dims of kernels with strides or broadcasts.
inline constexpr std::size_t kMaxDims = 8;
}  // namespace kernels

/// Lends temporary memory to kernels, so that it is counted like any other.
struct ScratchProvider {
  virtual ~ScratchProvider() = default;
  /// At least `bytes` bytes, aligned to 64; throws Error when there is none.
  virtual void* acquire(std::size_t bytes) = 0;
  /// Takes back what `acquire` returned.
  virtual void release(void* pointer) = 0;
};

/// What a kernel needs besides its arguments: modes, scratch, cached plans.
class KernelContext {
 public:
  /// Without a provider, scratch comes from the C++ heap (CPU only).
  explicit KernelContext(ScratchProvider* scratch = nullptr,
                         DeviceType type = DeviceType::kCpu);
  ~KernelContext();
  KernelContext(const KernelContext&) = delete;
  KernelContext& operator=(const KernelContext&) = delete;

  /// Where the arrays lie, and so which kernels run.
  const DeviceType device_type;
  /// The cudaStream_t that CUDA kernels are issued to, on the calling thread's
  /// current CUDA device; null on the CPU.
  void* stream = nullptr;
  /// CUDA: products of f32 may round their operands to TF32.
  bool allow_tf32 = false;
  /// State of CUDA kernels between calls: handles, plans, the error that a
  /// kernel found. They create it at first use.
  std::shared_ptr<void> cuda_state;

  /// Matrix products of 16-bit elements, too, add in increasing k, whatever the
  /// shape or position: an element of the result depends on its row and its
  /// column only. Slower where the processor has matrix units for bf16.
  bool deterministic = false;

  void* acquire_scratch(std::size_t bytes);
  void release_scratch(void* pointer) noexcept;

  /// Engine, stream and cached primitives of oneDNN; made on first use.
  struct Plans;
  Plans& plans();

 private:
  ScratchProvider* scratch_;
  std::shared_ptr<Plans> plans_;
};

/// Scratch memory for the duration of a scope.
class Scratch {
 public:
  Scratch(KernelContext& context, std::size_t bytes)
      : context_(context),
        data_(bytes == 0 ? nullptr : context.acquire_scratch(bytes)) {}
  ~Scratch() {
    if (data_ != nullptr) context_.release_scratch(data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  KernelContext& context_;
  void* data_;
};

namespace kernels {
/// Sizes, strides or coordinates, one per dimension.
using Dims = std::vector<std::int64_t>;
}  // namespace kernels

}  // namespace shardbook
