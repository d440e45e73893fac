// 3x3 convolutions in f32, which Winograd's algorithm computes, against f64,
// which is computed as the definition says (tests/core/conv_test.cpp).

#include <algorithm>
#include <list>

#include "core/kernels/conv.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

// Relative to the largest result: sums of up to 1152 products, and transforms whose
// terms are a few times the inputs. Measured: below 4e-6.
constexpr double kTolerance = 1e-5;

ConvShape window(std::int64_t n, std::int64_t h, std::int64_t w,
                 std::int64_t in, std::int64_t out) {
  return {n, h, w, in, out, /*kh=*/3, /*kw=*/3, /*stride=*/1, /*padding=*/1};
}

/// Odd and even images; fewer patches than one turn takes, and more; whole tiles
/// of patches, and a tile with one.
std::vector<ConvShape> shapes() {
  return {window(3, 9, 7, 64, 128), window(12, 1, 1, 64, 64),
          window(1, 9, 10, 128, 64), window(3, 23, 16, 128, 64),
          window(1, 25, 25, 128, 64)};
}

/// The three passes of one convolution.
struct Passes {
  Array y, dx, dweight;
  bool operator==(const Passes& other) const {
    return y == other.y && dx == other.dx && dweight == other.dweight;
  }
};

struct Inputs {
  explicit Inputs(const ConvShape& s)
      : x(noise(s.n * s.h * s.w * s.in, 1)),
        weight(noise(s.out * s.depth(), 2)),
        bias(noise(s.out, 3)),
        dy(noise(s.rows() * s.out, 4)) {}
  std::vector<double> x, weight, bias, dy;
};

Passes run(DType dtype, const ConvShape& s, const Inputs& inputs,
           OrderedCopies* copies = nullptr) {
  KernelContext context;
  const Array x(dtype, inputs.x), weight(dtype, inputs.weight),
      bias(dtype, inputs.bias), dy(dtype, inputs.dy);
  Passes result = {Array(dtype, dy.size()), Array(dtype, x.size()),
                   Array(dtype, weight.size())};
  conv2d(context, dtype, s, x.data(), weight.data(), bias.data(),
         result.y.data(), copies);
  conv2d_backward_data(context, dtype, s, dy.data(), weight.data(),
                       result.dx.data(), copies);
  conv2d_backward_weight(context, dtype, s, x.data(), dy.data(),
                         result.dweight.data(), nullptr);
  return result;
}

void expect_near(const Array& a, const Array& b) {
  const std::vector<double> values = a.values(), expected = b.values();
  double largest = 0;
  for (const double v : expected) largest = std::max(largest, std::fabs(v));
  ASSERT_EQ(values.size(), expected.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i], kTolerance * largest) << "at " << i;
  }
}

TEST(Winograd, EveryPassComesNearF64) {
  for (const ConvShape& s : shapes()) {
    SCOPED_TRACE(testing::Message()
                 << s.n << " images " << s.h << " x " << s.w);
    const Inputs inputs(s);
    const Passes f64 = run(DType::kF64, s, inputs);
    // The scratch memory of one thread ends with its last patch: a sanitizer
    // sees a write behind it.
    with_threads(1, [&] {
      const Passes f32 = run(DType::kF32, s, inputs);
      expect_near(f32.y, f64.y);
      expect_near(f32.dx, f64.dx);
      expect_near(f32.dweight, f64.dweight);
    });
  }
}

TEST(Winograd, BitsDependOnNeitherThreadsNorOtherImages) {
  const ConvShape s = window(4, 20, 9, 64, 64);
  const Inputs inputs(s);
  const Passes one = run(DType::kF32, s, inputs);
  for (const int threads : {2, 3}) {
    with_threads(threads, [&] {
      EXPECT_TRUE(run(DType::kF32, s, inputs) == one) << threads << " threads";
    });
  }
  // The last image alone
  const ConvShape last = window(1, s.h, s.w, s.in, s.out);
  Inputs alone = inputs;
  alone.x.erase(alone.x.begin(), alone.x.end() - s.h * s.w * s.in);
  alone.dy.erase(alone.dy.begin(), alone.dy.end() - s.h * s.w * s.out);
  const Passes of_last = run(DType::kF32, last, alone);
  const auto is_end_of = [](const Array& end, const Array& all) {
    const std::vector<double> a = end.values(), b = all.values();
    return std::equal(a.rbegin(), a.rend(), b.rbegin());
  };
  EXPECT_TRUE(is_end_of(of_last.y, one.y));
  EXPECT_TRUE(is_end_of(of_last.dx, one.dx));
}

/// Keeps every copy, as the storage of a weight does.
class KeptCopies : public OrderedCopies {
 public:
  void* find_or_make(const SharedKernelOrder& order, std::size_t bytes,
                     const std::function<void(void*)>& fill) override {
    for (auto& [known, data] : kept_) {
      if (known->equals(*order)) return data.data();
    }
    kept_.emplace_back(order, std::vector<char>(bytes));
    fill(kept_.back().second.data());
    return kept_.back().second.data();
  }
  std::size_t size() const { return kept_.size(); }

 private:
  std::list<std::pair<SharedKernelOrder, std::vector<char>>> kept_;
};

// With as many inputs as outputs, the two orders of a weight have one size: the
// values alone tell them apart.
TEST(Winograd, KeepsACopyOfTheWeightForEachDirection) {
  const ConvShape s = window(2, 8, 6, 64, 64);
  const Inputs inputs(s);
  KeptCopies copies;
  const Passes fresh = run(DType::kF32, s, inputs);
  EXPECT_TRUE(run(DType::kF32, s, inputs, &copies) == fresh);
  EXPECT_EQ(copies.size(), 2u);
  EXPECT_TRUE(run(DType::kF32, s, inputs, &copies) == fresh);
  EXPECT_EQ(copies.size(), 2u);
}

}  // namespace
}  // namespace shardbook::kernels
