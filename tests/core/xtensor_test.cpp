// Tensors as xtensor expressions, and NumPy's files.

#include "core/xtensor.h"

#include <xtensor/xindex_view.hpp>
#include <xtensor/xmanipulation.hpp>

#include "tests/core/support.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

Tensor counting(const Shape& shape, DType dtype = DType::kF64) {
  Tensor x = Tensor::empty(shape, {dtype, Device()});
  x.copy_from(Tensor::arange(shape_numel(shape)).flat_view(0, shape));
  return x;
}

TEST(Xtensor, SlicesAndMasksWriteThrough) {
  const Tensor x = counting({2, 3});
  auto view = as_xtensor<double>(x);
  xt::view(view, xt::all(), 1) = -1;
  xt::filter(view, view > 3) *= 10;
  EXPECT_EQ(values(x), (std::vector<double>{0, -1, 2, 3, -1, 50}));
}

TEST(Xtensor, ReadsAViewFromItsOffset) {
  const Tensor rows = counting({3, 2}).rows_view(1, 3);
  const auto view = as_xtensor<double>(rows);
  EXPECT_EQ(view.shape(), (std::vector<std::size_t>{2, 2}));
  EXPECT_EQ(view(0, 0), 2);
  EXPECT_EQ(view(1, 1), 5);
}

TEST(Xtensor, KeepsItsTensorAlive) {
  const Device device = Device::cpu();
  auto view = as_xtensor<float>(Tensor::full({4}, 7, {DType::kF32, device}));
  EXPECT_GT(device.memory().current_total, 0);
  EXPECT_EQ(xt::sum(view)(), 28);
}

TEST(Xtensor, ExpressionsBecomeTensors) {
  const Tensor x = counting({2, 3}, DType::kF32);
  const auto view = as_xtensor<float>(x);
  const Tensor turned = from_xtensor(xt::transpose(view));
  EXPECT_EQ(turned.shape(), (Shape{3, 2}));
  EXPECT_EQ(turned.dtype(), DType::kF32);
  EXPECT_EQ(values(turned), (std::vector<double>{0, 3, 1, 4, 2, 5}));
  const Tensor mask = from_xtensor(view > 2);
  EXPECT_EQ(mask.dtype(), DType::kI64);
  EXPECT_EQ(values(mask), (std::vector<double>{0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(from_xtensor(xt::sum(view)).shape(), Shape{});
}

TEST(Xtensor, RefusesOtherTypesAndMemory) {
  const Tensor x = counting({2, 3});
  expect_error([&] { as_xtensor<float>(x); }, {"f64"});
  expect_error(
      [] {
        as_xtensor<float>(Tensor::empty({2}, {DType::kF32, Device::meta()}));
      },
      {"as_xtensor", "meta:0", "host memory"});
}

// --- Files, whose bytes are NumPy's ------------------------------------------

std::string npy(const std::string& type, const std::string& shape,
                const std::string& data, const std::string& order = "False") {
  std::string header = "{'descr': '" + type + "', 'fortran_order': " + order +
                       ", 'shape': " + shape + ", }";
  header += std::string(117 - header.size(), ' ') + "\n";
  return std::string("\x93NUMPY\1\0", 8) +
         std::string{static_cast<char>(header.size()), '\0'} + header + data;
}

class Npy : public testing::Test {
 protected:
  Tensor load(const std::string& bytes) {
    write_bytes(path, bytes);
    return load_npy(path);
  }
  const TempFolder folder;
  const std::string path = folder / "x.npy";
};

TEST_F(Npy, EveryTypeComesBack) {
  for (const DType dtype :
       {DType::kF64, DType::kF32, DType::kI64, DType::kI32}) {
    for (const Shape& shape : {Shape{2, 3}, Shape{0, 3}, Shape{}}) {
      const Tensor x = counting(shape, dtype);
      save_npy(path, x);
      EXPECT_TRUE(bitwise_equal(load_npy(path), x)) << dtype_name(dtype);
    }
  }
  save_npy(path, counting({5}, DType::kBF16));
  EXPECT_TRUE(bitwise_equal(load_npy(path), counting({5}, DType::kF32)));
}

TEST_F(Npy, WritesWhatNumPyReads) {
  save_npy(path, Tensor::from_values<std::int32_t>({1, 2}, {1, 2}));
  const std::string bytes = read_bytes(path);
  EXPECT_EQ(bytes.substr(0, 8), std::string("\x93NUMPY\1\0", 8));
  EXPECT_EQ((bytes.size() - 8) % 64, 0u);  // two values after the header
  EXPECT_NE(bytes.find("{'descr': '<i4', 'fortran_order': False, "
                       "'shape': (1, 2), }"),
            std::string::npos);
  EXPECT_EQ(bytes.substr(bytes.size() - 8), std::string("\1\0\0\0\2\0\0\0", 8));
}

TEST_F(Npy, ReadsIntegersAndFortranOrder) {
  const Tensor ids = load(npy("<u2", "(2,)", "\x01\x02\x50\xc4"));
  EXPECT_EQ(ids.dtype(), DType::kI64);
  EXPECT_EQ(values(ids), (std::vector<double>{0x201, 50256}));
  const Tensor turned = load(npy("|i1", "(2, 2)", "\1\2\3\xff", "True"));
  EXPECT_EQ(values(turned), (std::vector<double>{1, 3, 2, -1}));
}

// Versions 2 and 3 have 32 bits for the length of the header.
TEST_F(Npy, ReadsEveryVersionOfTheFormat) {
  const std::string first = npy("<i4", "(2,)", "12345678");
  for (const char version : {'\2', '\3'}) {
    const std::string later = std::string("\x93NUMPY") + version + '\0' +
                              first.substr(8, 2) + std::string(2, '\0') +
                              first.substr(10);
    EXPECT_TRUE(bitwise_equal(load(later), load(first)));
  }
  std::string unknown = first;
  unknown[6] = '\4';
  expect_error([&] { load(unknown); }, {path, "version is 4.0", "2.0 and 3.0"});
}

TEST_F(Npy, RefusesBadFilesWithASentence) {
  expect_error([&] { load_npy(folder / "none"); }, {"none", "No such file"});
  expect_error([&] { load(npy("<f2", "(1,)", "ab")); },
               {path, "<f2", "float32"});
  expect_error([&] { load(npy(">f4", "(1,)", "abcd")); }, {path, ">f4"});
  // A value too short; longer than memory; sizes that overflow 64 bits
  for (const char* shape :
       {"(3,)", "(1000000000000000,)", "(4294967296, 4294967296)",
        "(100000000000000000000000000000,)", "(1 5,)", "(-1,)"}) {
    EXPECT_NE(error_of([&] { load(npy("<i4", shape, "12345678")); }), "")
        << shape;
  }
  const std::string good = npy("<i4", "(2,)", "12345678");
  EXPECT_EQ(load(good).numel(), 2);
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_NE(error_of([&] { load(good.substr(0, size)); }), "") << size;
  }
  for (std::size_t i = 0; i < 128; ++i) {  // every byte of the header, planted
    for (const char byte : {'\0', '\'', '(', '9', '}'}) {
      std::string bad = good;
      bad[i] = byte;
      error_of([&] { load(bad); });
    }
  }
}

}  // namespace
}  // namespace shardbook
