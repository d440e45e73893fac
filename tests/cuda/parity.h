#pragma once

// A kernel on the CPU and the same kernel on CUDA, on the same arrays.
//
//   TEST_P(ElementwiseParity, AxpyEqualsTheCpu) {
//     for (const std::int64_t n : lengths()) {
//       Comparison c(dtype);
//       c.expect_equal(kernels::axpy, tolerance(dtype), dtype, n, 0.5,
//                      c.noise(n, 1), c.noise(n, 2));
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

struct Matrix {
  std::int64_t rows, cols;
  std::int64_t size() const { return rows * cols; }
};

/// The values times `factor`, plus `shift`.
std::vector<double> scaled(double factor, std::vector<double> values,
                           double shift = 0);

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
  DeviceArray(CudaContext& context, const Array& values);
  ~DeviceArray();
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  Pointer data() const { return {data_}; }
  void write(CudaContext& context, const void* from);
  /// Waits for what the context's stream was given.
  void read(CudaContext& context, void* to) const;

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

class Comparison {
 public:
  /// Arrays have this dtype where they are given no other.
  explicit Comparison(DType dtype = DType::kF64);
  ~Comparison();

  /// An array that both sides begin with.
  Slot array(const std::vector<double>& values) {
    return array(Array(dtype_, values));
  }
  Slot array(DType dtype, const std::vector<double>& values) {
    return array(Array(dtype, values));
  }
  Slot array(Array values);
  Slot noise(std::int64_t n, std::uint64_t seed) {
    return array(kernels::noise(n, seed));
  }
  Slot noise(DType dtype, std::int64_t n, std::uint64_t seed) {
    return array(dtype, kernels::noise(n, seed));
  }
  /// An array that begins as NaN (integers: -1) on both sides.
  Slot empty(std::int64_t n) { return empty(dtype_, n); }
  Slot empty(DType dtype, std::int64_t n);
  /// Null on both sides.
  static Slot null() { return {-1}; }

  /// One side of the comparison: its context, and its pointers for slots.
  struct Side {
    Comparison& comparison;
    KernelContext& context;
    Pointer operator()(const Slot& slot) const { return from(slot, 0); }
    /// The array from this element on.
    Pointer from(const Slot& slot, std::int64_t element) const;
    template <typename T>
    const T& operator()(const T& value) const {
      return value;
    }
  };

  /// Calls body(side) for both sides and compares what it leaves and returns:
  /// |cuda - cpu| <= tolerance * (1 + |cpu|) in every element of every array
  /// and for the result; NaN equals NaN, and 0 is -0. With 0 both must be equal.
  /// Further calls begin with the arrays as the CPU left them.
  template <typename Body>
  void expect_equal_in(double tolerance, const Body& body) {
    const Side cpu{*this, cpu_}, cuda{*this, cuda_.kernels()};
    tolerance_ = tolerance;
    keep_arrays();
    if constexpr (std::is_void_v<decltype(body(cpu))>) {
      body(cpu);
      for (int order = 0; begin(order); ++order) {
        body(cuda);
        compare();
      }
    } else {
      const auto expected = static_cast<double>(body(cpu));
      for (int order = 0; begin(order); ++order) {
        const auto found = static_cast<double>(body(cuda));
        compare();
        compare_results(expected, found);
      }
    }
  }
  template <typename Kernel, typename... Args>
  void expect_equal(const Kernel& kernel, double tolerance,
                    const Args&... args) {
    expect_equal_in(tolerance, [&](const Side& on) {
      return kernel(on.context, on(args)...);
    });
  }

  KernelContext& cuda() { return cuda_.kernels(); }
  /// The array as the CPU left it.
  const Array& cpu_array(Slot slot) const { return both_[slot.index]->cpu; }

 private:
  struct Both {
    Array before, cpu;
    std::unique_ptr<DeviceArray> cuda;
  };
  // Both sides begin with what the CPU's arrays hold.
  void keep_arrays();
  // Chooses an order and writes the arrays anew; false when all are done.
  bool begin(int order);
  void compare();
  void compare_results(double expected, double found) const;
  // "order 1, arrays of 6 6 3 elements, ".
  std::string place() const;

  const DType dtype_;
  KernelContext cpu_;
  CudaContext cuda_;
  double tolerance_ = 0;
  int order_ = 0;
  std::vector<std::unique_ptr<Both>> both_;
};

/// Suites over dtypes: TEST_P bodies see `dtype`.
class ParityTest : public testing::TestWithParam<DType> {
 protected:
  DType dtype = GetParam();
  DType stat = kernels::stat_dtype(dtype);
};

/// On which device the tests run: parity_emulated.cpp or parity_device.cpp is
/// linked. choose_library is called before the first use of a device: it says
/// which library core loads.
void choose_library();
/// The orders of threads, blocks and streams to try; 0 is the usual one.
int num_orders();
void choose_order(int order);

}  // namespace shardbook::parity
