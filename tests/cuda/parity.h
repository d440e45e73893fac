#pragma once

// A kernel on the CPU and the same kernel on CUDA, on the same arrays.
//
//   TEST_P(ElementwiseParity, AxpyEqualsTheCpu) {
//     for (const std::int64_t n : lengths()) {
//       Comparison c;
//       const Slot x = c.array(dtype, noise(n, 1));
//       const Slot y = c.array(dtype, noise(n, 2));
//       c.expect_equal(kernels::axpy, tolerance(dtype), dtype, n, 0.5, x, y);
//     }
//   }
//
// expect_equal calls both, and compares all arrays afterwards (what should only
// be read must not have changed) and the result, if there is one. Under the
// emulator the kernel runs three times: with threads, blocks and streams in
// order, backwards, and shuffled.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/kernels/kernel.h"
#include "tests/kernels/support.h"

namespace shardbook::parity {

using kernels::Array;

/// An array of a comparison; stands for its pointer among the arguments.
struct Slot {
  int index;
};

/// What a slot becomes in a call.
struct Pointer {
  void* address;
  template <typename T>
  operator T*() const {
    return static_cast<T*>(address);
  }
};

/// Lengths at which kernels change their ways: none, one, odd, a warp, a block,
/// more than one block, and more than all blocks have threads for once.
const std::vector<std::int64_t>& lengths();

/// How many elements an array of this shape has.
inline std::int64_t elements_of(const kernels::Dims& shape) {
  std::int64_t n = 1;
  for (const std::int64_t size : shape) n *= size;
  return n;
}

/// A context of device 0 with a stream and scratch of its own.
class CudaContext {
 public:
  CudaContext();
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  KernelContext& kernels() { return *context_; }
  /// Waits, and throws what went wrong on the device.
  void synchronize();

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<KernelContext> context_;
};

/// `bytes` bytes of device memory, without a byte to spare.
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t bytes);
  ~DeviceArray();
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  void* data() const { return data_; }
  void write(CudaContext& context, const void* from);
  /// Waits for what the context's stream was given.
  void read(CudaContext& context, void* to) const;

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

class Comparison {
 public:
  Comparison();
  ~Comparison();

  /// An array that both sides begin with.
  Slot array(DType dtype, const std::vector<double>& values);
  Slot array(Array values);
  /// An array that begins as NaN (integers: -1) on both sides.
  Slot empty(DType dtype, std::int64_t n);
  /// Compared exactly, byte by byte.
  Slot bytes(std::size_t n);
  /// Null on both sides.
  static Slot null() { return {-1}; }

  /// Further calls begin with the arrays as the CPU left them.
  /// |cuda - cpu| <= tolerance * (1 + |cpu|) in every element of every array
  /// and for the result; NaN equals NaN, and 0 is -0. With 0 both must be equal.
  template <typename Kernel, typename... Args>
  void expect_equal(const Kernel& kernel, double tolerance,
                    const Args&... args) {
    using Result = decltype(kernel(cpu_, on_cpu(args)...));
    tolerance_ = tolerance;
    keep_arrays();
    if constexpr (std::is_void_v<Result>) {
      kernel(cpu_, on_cpu(args)...);
      for (int order = 0; begin(order); ++order) {
        kernel(cuda_.kernels(), on_cuda(args)...);
        compare();
      }
    } else {
      const Result expected = kernel(cpu_, on_cpu(args)...);
      for (int order = 0; begin(order); ++order) {
        const Result found = kernel(cuda_.kernels(), on_cuda(args)...);
        compare();
        compare_results(static_cast<double>(expected),
                        static_cast<double>(found));
      }
    }
  }

  KernelContext& cpu() { return cpu_; }
  KernelContext& cuda() { return cuda_.kernels(); }
  /// The array as the CPU left it; for further checks of a test.
  const Array& cpu_array(Slot slot) const { return sides_[slot.index]->cpu; }
  Array cuda_array(Slot slot);

 private:
  struct Side {
    Array before, cpu;
    bool is_exact = false;
    std::unique_ptr<DeviceArray> cuda;
  };
  template <typename T>
  const T& on_cpu(const T& value) {
    return value;
  }
  template <typename T>
  const T& on_cuda(const T& value) {
    return value;
  }
  Pointer on_cpu(const Slot& slot);
  Pointer on_cuda(const Slot& slot);
  // What the CPU's arrays hold is where both sides begin.
  void keep_arrays();
  // Chooses an order and writes the arrays anew; false when all are done.
  bool begin(int order);
  void compare();
  void compare_results(double expected, double found) const;

  KernelContext cpu_;
  CudaContext cuda_;
  double tolerance_ = 0;
  std::string order_;
  std::vector<std::unique_ptr<Side>> sides_;
};

/// Suites over dtypes: TEST_P bodies see `dtype`.
class ParityTest : public testing::TestWithParam<DType> {
 protected:
  DType dtype = GetParam();
};

inline const std::vector<DType>& all_dtypes() {
  static const std::vector<DType> dtypes = {DType::kF64,  DType::kF32,
                                            DType::kBF16, DType::kF16,
                                            DType::kI64,  DType::kI32};
  return dtypes;
}

#define SB_PARITY_OVER_FLOATING_DTYPES(suite)                     \
  INSTANTIATE_TEST_SUITE_P(                                       \
      Dtypes, suite,                                              \
      testing::ValuesIn(::shardbook::kernels::floating_dtypes()), \
      ::shardbook::kernels::dtype_test_name)
#define SB_PARITY_OVER_ALL_DTYPES(suite)                                   \
  INSTANTIATE_TEST_SUITE_P(                                                \
      Dtypes, suite, testing::ValuesIn(::shardbook::parity::all_dtypes()), \
      ::shardbook::kernels::dtype_test_name)

}  // namespace shardbook::parity
