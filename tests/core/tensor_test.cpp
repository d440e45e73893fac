// Handles, views, storage.

#include "core/tensor.h"

#include "core/tensor_storage.h"
#include "tests/core/support.h"
#include "tests/support/dtypes.h"

namespace shardbook {
namespace {

TEST(Shape, CountsAndPrints) {
  EXPECT_EQ(shape_numel({}), 1);
  EXPECT_EQ(shape_numel({2, 3, 4}), 24);
  EXPECT_EQ(shape_numel({2, 0}), 0);
  EXPECT_EQ(shape_text({}), "[]");
  EXPECT_EQ(shape_text({2, 3}), "[2, 3]");
}

TEST(Shape, RefusesNegativeSizesAndOverflow) {
  expect_error([] { shape_numel({2, -1}); }, {"[2, -1]", "negative"});
  expect_error(
      [] {
        shape_numel({1LL << 40, 1LL << 40});
      },
      {"more elements than can be counted"});
}

TEST(Shape, BytesThatOverflowAreRefused) {
  // 2^61 elements can be counted, but not their bytes.
  expect_error([] { Tensor::empty({1LL << 61}, kOfF64); },
               {"[2305843009213693952]"});
  expect_error(
      [] {
        Tensor::empty({1LL << 61}, {DType::kF64, Device::meta()});
      },
      {"[2305843009213693952]"});
}

TEST(DTypes, HaveNamesAndSizes) {
  const std::vector<std::pair<std::string, std::size_t>> all = {
      {"f64", 8}, {"f32", 4}, {"bf16", 2}, {"f16", 2}, {"i64", 8}, {"i32", 4}};
  for (const auto& [name, bytes] : all) {
    const DType dtype = dtype_from_name(name);
    EXPECT_EQ(dtype_name(dtype), name);
    EXPECT_EQ(dtype_bytes(dtype), bytes);
    EXPECT_EQ(is_floating(dtype), name.find('f') != std::string::npos);
  }
  expect_error([] { dtype_from_name("float"); }, {"float", "f32", "bf16"});
}

TEST(Tensor, UndefinedOnesSaySo) {
  const Tensor none;
  EXPECT_FALSE(none.defined());
  EXPECT_FALSE(none.requires_grad());
  expect_error([&] { none.shape(); }, {"undefined"});
  expect_error([&] { none.grad(); }, {"undefined"});
  expect_error([&] { none.detach(); }, {"undefined"});
  expect_error([&] { none.device(); }, {"undefined"});
}

TEST(Tensor, MakersFill) {
  EXPECT_EQ(values(Tensor::zeros({2, 2})), (std::vector<double>(4, 0)));
  EXPECT_EQ(values(Tensor::full({3}, 2.5)), (std::vector<double>(3, 2.5)));
  EXPECT_EQ(values(Tensor::arange(4, {DType::kI64, Device()})),
            (std::vector<double>{0, 1, 2, 3}));
  EXPECT_EQ(Tensor::from_values<float>({1}, {}).dtype(), DType::kF32);
  EXPECT_EQ(Tensor::from_values<std::int32_t>({1}, {1}).dtype(), DType::kI32);
  EXPECT_EQ(values(Tensor::full({}, 7)), std::vector<double>{7});
  EXPECT_EQ(Tensor::zeros({0, 3}).numel(), 0);
  expect_error(
      [] {
        Tensor::from_values<float>({1, 2}, {3});
      },
      {"2 values", "[3]"});
}

TEST(Tensor, SizesCountFromBothEnds) {
  const Tensor x = Tensor::zeros({2, 3, 4});
  EXPECT_EQ(x.size(0), 2);
  EXPECT_EQ(x.size(-1), 4);
  EXPECT_EQ(x.size(-3), 2);
  EXPECT_EQ(x.ndim(), 3);
  EXPECT_EQ(x.bytes(), 96);
  expect_error([&] { x.size(3); }, {"dim 3", "[2, 3, 4]"});
  expect_error([&] { x.size(-4); }, {"dim -4"});
}

TEST(Tensor, DataChecksTheType) {
  const Tensor x = Tensor::zeros({2});
  EXPECT_NE(x.data<float>(), nullptr);
  expect_error([&] { x.data<double>(); }, {"f32", "f64"});
  expect_error([&] { x.item(); }, {"[2]", "single value"});
}

TEST(Tensor, CopyFromConvertsBetweenAllDtypes) {
  // 1.5, -2, 0 are exact in every floating dtype; integers drop the half.
  for (DType from : kAllDTypes) {
    for (DType to : kAllDTypes) {
      Tensor source = Tensor::empty({3}, {from, Device()});
      source.copy_from(Tensor::from_values<double>({1.5, -2, 0}, {3}));
      Tensor target = Tensor::empty({3}, {to, Device()});
      target.copy_from(source);
      const double first = is_floating(from) && is_floating(to) ? 1.5 : 1.0;
      EXPECT_EQ(values(target), (std::vector<double>{first, -2, 0}))
          << dtype_name(from) << " to " << dtype_name(to);
    }
  }
  expect_error([] { Tensor::zeros({2}).copy_from(Tensor::zeros({3})); },
               {"[3]", "[2]"});
}

TEST(Tensor, HandlesShareAndClonesDoNot) {
  Tensor x = Tensor::zeros({4});
  Tensor same = x;
  Tensor copy = x.clone();
  x.fill(3);
  EXPECT_EQ(values(same), (std::vector<double>(4, 3)));
  EXPECT_EQ(values(copy), (std::vector<double>(4, 0)));
  EXPECT_TRUE(x.is_same(same));
  EXPECT_FALSE(x.is_same(copy));
  EXPECT_TRUE(x.shares_storage(same));
  EXPECT_FALSE(x.shares_storage(copy));
  EXPECT_EQ(x.id(), same.id());
}

TEST(Views, RowsAndFlatViewsShareTheArray) {
  const Tensor x = Tensor::arange(12, kOfF64);
  const Tensor m = reshape(x, {4, 3});
  const Tensor rows = m.rows_view(1, 3);
  EXPECT_EQ(rows.shape(), (Shape{2, 3}));
  EXPECT_EQ(values(rows), (std::vector<double>{3, 4, 5, 6, 7, 8}));
  const Tensor part = rows.flat_view(2, {2});
  EXPECT_EQ(values(part), (std::vector<double>{5, 6}));
  part.fill(-1);
  EXPECT_EQ(values(x)[5], -1);
  EXPECT_EQ(values(x)[6], -1);
  EXPECT_TRUE(part.shares_storage(x));
  EXPECT_FALSE(part.is_same(x));
  EXPECT_EQ(m.rows_view(4, 4).numel(), 0);
  expect_error([&] { m.rows_view(2, 5); }, {"rows 2 to 5", "[4, 3]"});
  expect_error([&] { m.rows_view(3, 2); }, {"rows 3 to 2"});
  expect_error([&] { rows.flat_view(5, {2}); }, {"2 elements at 5", "of 6"});
  expect_error([&] { rows.flat_view(-1, {2}); }, {"at -1"});
}

TEST(Views, SlicesAlongDimZeroAreViewsAndOthersCopy) {
  const Tensor x = noise({4, 6});
  EXPECT_TRUE(slice(x, 0, 1, 3).shares_storage(x));
  EXPECT_FALSE(slice(x, 1, 1, 3).shares_storage(x));
  EXPECT_FALSE(slice(x, -1, 0, 6).shares_storage(x));
  EXPECT_TRUE(reshape(x, {-1, 3}).shares_storage(x));
  EXPECT_FALSE(transpose(x, 0, 1).shares_storage(x));
}

TEST(Views, AViewKeepsItsStorageAlive) {
  const Device device = Device::cpu();
  Tensor view;
  {
    const Tensor whole = Tensor::full({100}, 2, {DType::kF32, device});
    view = whole.rows_view(10, 12);
  }
  EXPECT_EQ(values(view), (std::vector<double>{2, 2}));
  EXPECT_EQ(device.memory().current_total, 400);
  view = Tensor();
  EXPECT_EQ(device.memory().current_total, 0);
}

TEST(SetData, MovesAParameterIntoAFlatBuffer) {
  const Device device = Device::cpu();
  const TensorOptions f64{DType::kF64, device};
  Tensor w = noise({2, 3}, 1, -1, 1, f64).set_requires_grad();
  const std::vector<double> before = values(w);
  const void* id = w.id();
  const Tensor flat = Tensor::zeros({10}, f64);
  const Tensor place = flat.flat_view(4, {2, 3});
  place.copy_from(w);
  set_data(w, place);
  EXPECT_EQ(w.id(), id);
  EXPECT_TRUE(w.requires_grad());
  EXPECT_EQ(w.shape(), (Shape{2, 3}));
  EXPECT_EQ(values(w), before);
  EXPECT_TRUE(w.shares_storage(flat));
  // The tensor's previous array is free again.
  EXPECT_EQ(device.memory().current_total, 80);
  flat.fill(5);
  EXPECT_EQ(values(w), (std::vector<double>(6, 5)));
}

TEST(SetData, TakesAnotherShapeOfTheSameNumberOfElements) {
  Tensor w = Tensor::zeros({2, 3});
  set_data(w, Tensor::full({6}, 1));
  EXPECT_EQ(w.shape(), (Shape{2, 3}));
  EXPECT_EQ(values(w), (std::vector<double>(6, 1)));
  expect_error([&] { set_data(w, Tensor::zeros({5})); },
               {"f32[5]", "f32[2, 3]"});
  expect_error(
      [&] {
        set_data(w, Tensor::zeros({2, 3}, kOfF64));
      },
      {"f64", "f32"});
}

TEST(ReleaseStorage, GivesMemoryBackAndTakesItAgain) {
  const Device device = Device::cpu();
  Tensor flat = Tensor::zeros({8}, {DType::kF32, device});
  const Tensor view = flat.flat_view(4, {2, 2});
  EXPECT_EQ(device.memory().current_total, 32);
  release_storage(flat);
  EXPECT_EQ(device.memory().current_total, 0);
  expect_error([&] { flat.raw(); }, {"storage was released"});
  expect_error([&] { view.raw(); }, {"storage was released"});
  EXPECT_EQ(view.shape(), (Shape{2, 2}));
  expect_error([&] { restore_storage(view); }, {"covers the storage"});
  restore_storage(flat);
  EXPECT_EQ(device.memory().current_total, 32);
  flat.fill(3);
  EXPECT_EQ(values(view), (std::vector<double>(4, 3)));
  // Calling it twice has no further effect.
  release_storage(flat);
  release_storage(flat);
  restore_storage(flat);
  restore_storage(flat);
  EXPECT_EQ(device.memory().current_total, 32);
}

TEST(MemoryKinds, BelongToTheWholeStorage) {
  const Device device = Device::cpu();
  Tensor x;
  {
    MemoryScope kind(MemoryKind::kCommunication);
    x = Tensor::zeros({4}, {DType::kF32, device});
  }
  EXPECT_EQ(memory_kind_of(x), MemoryKind::kCommunication);
  set_memory_kind(x.rows_view(0, 1), MemoryKind::kGradient);
  EXPECT_EQ(memory_kind_of(x), MemoryKind::kGradient);
  EXPECT_EQ(device.memory().current(MemoryKind::kCommunication), 0);
  EXPECT_EQ(device.memory().current(MemoryKind::kGradient), 16);
}

TEST(Comparisons, TellBitsFromValues) {
  const Tensor a = Tensor::from_values<float>({0.0f, 1.0f}, {2});
  const Tensor b = Tensor::from_values<float>({-0.0f, 1.0f}, {2});
  EXPECT_EQ(max_abs_difference(a, b), 0);
  EXPECT_FALSE(bitwise_equal(a, b));
  EXPECT_TRUE(bitwise_equal(a, a.clone()));
  EXPECT_FALSE(bitwise_equal(a, reshape(a, {1, 2})));
  EXPECT_FALSE(bitwise_equal(a, to_dtype(a, DType::kF64)));
  EXPECT_EQ(max_abs_difference(a, Tensor::from_values<double>({0.5, 1}, {2})),
            0.5);
  expect_error([&] { max_abs_difference(a, Tensor::zeros({3})); },
               {"[2]", "[3]"});
}

TEST(Comparisons, ANanIsADifference) {
  const Tensor a = Tensor::from_values<float>({std::nanf(""), 1.0f}, {2});
  const Tensor b = Tensor::from_values<float>({1.0f, 1.0f}, {2});
  EXPECT_FALSE(max_abs_difference(a, b) <= 1e30);
}

TEST(MetaTensors, HaveShapesAndNoValues) {
  const Device meta = Device::meta(2);
  const Tensor x = Tensor::full({3, 4}, 1, {DType::kF32, meta});
  EXPECT_TRUE(x.is_meta());
  EXPECT_EQ(x.raw(), nullptr);
  EXPECT_EQ(x.bytes(), 48);
  EXPECT_EQ(meta.memory().current_total, 48);
  expect_error([&] { x.to_vector<float>(); }, {"meta:2", "no values"});
  x.copy_from(Tensor::zeros({3, 4}));
  const Tensor arange = Tensor::arange(5, {DType::kI64, meta});
  EXPECT_EQ(arange.shape(), Shape{5});
  // More memory than any machine has; no element is accessed.
  const Tensor huge =
      Tensor::zeros({1LL << 20, 1LL << 20}, {DType::kF32, meta});
  EXPECT_EQ(huge.bytes(), 4LL << 40);
  EXPECT_EQ(meta.memory().current_total, (4LL << 40) + 48 + 40);
}

}  // namespace
}  // namespace shardbook
