// Our own kernels, each with one mistake that plant.py made: the emulator must
// find it, in the order of threads that hides it best as well.

#include <dlfcn.h>
#include <gmock/gmock.h>

#include "core/check.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/layout.h"
#include "core/kernels/norm.h"
#include "tests/cuda/parity.h"
#include "tests/cuda/parity_orders.h"

namespace shardbook::parity {
namespace {

using testing::AllOf;
using testing::AnyOf;
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

// 33 x 36: tiles at the edges are not full.
std::vector<std::string> transpose_failures() {
  return failures([](CudaContext& context) {
    constexpr std::int64_t kRows = 33, kCols = 36;
    const std::vector<float> values(kRows * kCols, 1.0f);
    DeviceArray from(sizeof(float) * values.size()),
        to(sizeof(float) * values.size());
    from.write(context, values.data());
    kernels::transpose(context.kernels(), DType::kF32, 1, kRows, kCols,
                       from.data(), to.data());
    context.synchronize();
  });
}

TEST(Planted, RightKernelIsNotAccused) {
  for (const std::string& text : transpose_failures()) EXPECT_EQ(text, "");
}

TEST(Planted, MissingBarrierOfTranspositionIsCaught) {
  load("transpose_without_barrier");
  for (const std::string& text : transpose_failures()) {
    EXPECT_THAT(text, AllOf(HasSubstr("transpose"), HasSubstr(": block "),
                            HasSubstr(", thread "), kRaceOrUnwritten,
                            HasSubstr("transpose_without_barrier.cpp:")));
  }
}

TEST(Planted, RaceOfTranspositionIsCaught) {
  load("transpose_with_race");
  for (const std::string& text : transpose_failures()) {
    EXPECT_THAT(text, AllOf(HasSubstr("race: it writes element "),
                            HasSubstr("wrote with no barrier in between")));
  }
}

TEST(Planted, OverrunOfTranspositionIsCaught) {
  load("transpose_with_overrun");
  for (const std::string& text : transpose_failures()) {
    EXPECT_THAT(text, HasSubstr("outside: it reads 0 bytes past the end of "
                                "the 4752 bytes"));
  }
}

TEST(Planted, OverrunOfRepeatIsCaught) {
  load("repeat_with_overrun");
  const auto all = failures([](CudaContext& context) {
    const float two = 2;
    DeviceArray value(sizeof(float)), x(sizeof(float) * 64);
    value.write(context, &two);
    kernels::repeat(context.kernels(), DType::kF32, 64, 1.0, value.data(),
                    x.data());
    context.synchronize();
  });
  for (const std::string& text : all) {
    EXPECT_THAT(text, HasSubstr("bytes past the end of the 256 bytes"));
  }
}

TEST(Planted, MissingBarrierOfLayerNormIsCaught) {
  load("layer_norm_without_barrier");
  const auto all = failures([](CudaContext& context) {
    constexpr std::int64_t kRows = 40, kCols = 96;
    const std::vector<float> values(kRows * kCols, 1.0f);
    DeviceArray x(4 * values.size()), dy(4 * values.size()),
        dx(4 * values.size()), gamma(4 * kCols), mean(4 * kRows),
        rstd(4 * kRows), dgamma(4 * kCols), dbeta(4 * kCols);
    for (DeviceArray* array : {&x, &dy, &gamma, &mean, &rstd}) {
      array->write(context, values.data());
    }
    kernels::layer_norm_backward(context.kernels(), DType::kF32, kRows, kCols,
                                 x.data(), gamma.data(), mean.data(),
                                 rstd.data(), dy.data(), dx.data(),
                                 dgamma.data(), dbeta.data(), false);
    context.synchronize();
  });
  for (const std::string& text : all) EXPECT_THAT(text, kRaceOrUnwritten);
}

}  // namespace
}  // namespace shardbook::parity
