// Our own kernels, each with one mistake that plant.py made: the emulator must
// find it, in the order of threads that hides it best as well.

#include <dlfcn.h>
#include <gmock/gmock.h>

#include "core/check.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/layout.h"
#include "core/kernels/norm.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::Each;
using testing::HasSubstr;

// From now on the kernels of this library are called, for they registered last.
void load(const std::string& name) {
  const CudaContext context;  // the right kernels are loaded by then
  const std::string path = PLANTED_LIBRARIES "/libplanted_" + name + ".so";
  ASSERT_NE(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
}

// What is said about `body`, in each order.
std::vector<std::string> failures(
    const std::function<void(CudaContext&)>& body) {
  std::vector<std::string> all;
  for (int order = 0; order < num_orders(); ++order) {
    choose_order(order);
    CudaContext context;
    try {
      body(context);
      context.synchronize();
      all.push_back("");
    } catch (const Error& error) {
      all.push_back(error.what());
    }
  }
  choose_order(0);
  return all;
}

const auto kRaceOrUnwritten = AnyOf(
    HasSubstr("race: it reads element "), HasSubstr("race: it writes element "),
    HasSubstr("not written: it reads element "));

// `n` ones on the device.
DeviceArray ones(CudaContext& context, std::int64_t n) {
  return DeviceArray(context, Array(DType::kF32, std::vector<double>(n, 1)));
}

// 33 x 36: tiles at the edges are not full.
std::vector<std::string> transpose_failures() {
  return failures([](CudaContext& context) {
    const DeviceArray from = ones(context, 33 * 36),
                      to = ones(context, 33 * 36);
    kernels::permute(context.kernels(), DType::kF32, {33, 36}, {1, 0},
                     from.data(), to.data());
    context.synchronize();
  });
}

TEST(Planted, RightKernelIsNotAccused) {
  EXPECT_THAT(transpose_failures(), Each(""));
}

TEST(Planted, MissingBarrierOfTranspositionIsCaught) {
  load("transpose_without_barrier");
  EXPECT_THAT(transpose_failures(),
              Each(AllOf(HasSubstr("transpose"), HasSubstr(": block "),
                         HasSubstr(", thread "), kRaceOrUnwritten,
                         HasSubstr("transpose_without_barrier.cpp:"))));
}

TEST(Planted, RaceOfTranspositionIsCaught) {
  load("transpose_with_race");
  EXPECT_THAT(transpose_failures(),
              Each(AllOf(HasSubstr("race: it writes element "),
                         HasSubstr("wrote with no barrier in between"))));
}

TEST(Planted, OverrunOfTranspositionIsCaught) {
  load("transpose_with_overrun");
  EXPECT_THAT(transpose_failures(),
              Each(HasSubstr("outside: it reads 0 bytes past the end of "
                             "the 4752 bytes")));
}

TEST(Planted, OverrunOfRepeatIsCaught) {
  load("repeat_with_overrun");
  const auto all = failures([](CudaContext& context) {
    const DeviceArray value = ones(context, 1), x = ones(context, 64);
    kernels::repeat(context.kernels(), DType::kF32, 64, 1.0, value.data(),
                    x.data());
    context.synchronize();
  });
  EXPECT_THAT(all, Each(HasSubstr("bytes past the end of the 256 bytes")));
}

TEST(Planted, MissingBarrierOfLayerNormIsCaught) {
  load("layer_norm_without_barrier");
  const auto all = failures([](CudaContext& context) {
    constexpr std::int64_t kRows = 40, kCols = 96;
    const DeviceArray x = ones(context, kRows * kCols),
                      dy = ones(context, kRows * kCols),
                      dx = ones(context, kRows * kCols),
                      gamma = ones(context, kCols), mean = ones(context, kRows),
                      rstd = ones(context, kRows),
                      dgamma = ones(context, kCols),
                      dbeta = ones(context, kCols);
    kernels::layer_norm_backward(context.kernels(), DType::kF32, kRows, kCols,
                                 x.data(), gamma.data(), mean.data(),
                                 rstd.data(), dy.data(), dx.data(),
                                 dgamma.data(), dbeta.data());
    context.synchronize();
  });
  EXPECT_THAT(all, Each(kRaceOrUnwritten));
}

}  // namespace
}  // namespace shardbook::parity
