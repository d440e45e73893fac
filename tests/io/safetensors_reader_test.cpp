#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>

#include "core/safetensors.h"
#include "tests/io/support.h"

namespace shardbook {
namespace {

using ::testing::AllOf;
using testing::file_bytes;
using testing::file_with;
using ::testing::HasSubstr;
using ::testing::StartsWith;

SafetensorsFile read(const std::string& bytes) {
  return SafetensorsFile::view(bytes.data(), bytes.size(), "x.safetensors");
}

/// One way in which a file can be wrong, and what the sentence must say.
struct Malformed {
  std::string kind;
  std::string bytes;
  std::string says;
};

std::string tensor(const std::string& dtype, const std::string& shape,
                   const std::string& offsets, const std::string& name = "a") {
  return "\"" + name + "\":{\"dtype\":" + dtype + ",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}
std::string one(const std::string& dtype, const std::string& shape,
                const std::string& offsets, std::size_t data_bytes) {
  return file_with(std::string("{") + tensor(dtype, shape, offsets) + "}",
                   data_bytes);
}
std::string f32(const std::string& shape, const std::string& offsets,
                std::size_t data_bytes) {
  return one("\"F32\"", shape, offsets, data_bytes);
}
std::string two(const std::string& first, const std::string& second,
                std::size_t data_bytes) {
  return file_with(std::string("{") + tensor("\"F32\"", "[1]", first) + "," +
                       tensor("\"F32\"", "[1]", second, "b") + "}",
                   data_bytes);
}

const std::string kGood = f32("[1]", "[0,4]", 4);

std::vector<Malformed> malformed_files() {
  const std::string good = tensor("\"F32\"", "[1]", "[0,4]");
  const std::string deep(100000, '[');
  std::string ones;
  for (int dim = 1; dim <= 64; ++dim) ones += ",1";
  const std::string largest = "9223372036854775807";
  std::vector<Malformed> cases = {
      // The length in front.
      {"Empty", "", "has 0 bytes"},
      {"ShorterThanTheLength", "1234567", "has 7 bytes"},
      {"LengthZero", file_bytes(0, "{}"), "header length is 0"},
      {"LengthBeyondTheFile", file_bytes(3, "{}"), "only 2 bytes follow"},
      {"LengthOverTheLimit", file_bytes(100000001, "{}"),
       "length is 100000001; allowed are 1 to 100000000"},
      {"LengthThatWraps", file_bytes(~0ull, "{}"),
       "length is 18446744073709551615"},
      // The JSON.
      {"NotUtf8", file_with("{\"\xff\":1}"), "not valid JSON in UTF-8"},
      {"JsonCutShort", file_with("{\"a\":"), "not valid JSON"},
      {"JsonAndMore", file_with("{}x"), "not valid JSON"},
      {"TrailingComma", file_with(std::string("{") + good + ",}", 4),
       "not valid JSON"},
      {"ZeroByte", file_with(std::string("{}\0x", 4)), "byte 2 is zero"},
      {"ByteOrderMark", file_with("\xef\xbb\xbf{}"), "does not start with '{'"},
      {"LeadingSpace", file_with(" {}"), "does not start with '{'"},
      {"HeaderIsAnArray", file_with("[]"), "does not start with '{'"},
      {"DeepNesting", file_with("{\"a\":" + deep), "nests deeper than 64"},
      // The names.
      {"SameNameTwice",
       file_with(std::string("{") + good + "," + good + "}", 4),
       "'a' appears twice"},
      {"SameNameEscaped",
       file_with(std::string("{") + good + "," +
                     tensor("\"F32\"", "[1]", "[4,8]", "\\u0061") + "}",
                 8),
       "'a' appears twice"},
      {"MetadataTwice", file_with("{\"__metadata__\":{},\"__metadata__\":{}}"),
       "'__metadata__' appears twice"},
      {"KeyTwice",
       file_with(
           R"({"a":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}})",
           4),
       "'dtype' appears twice"},
      // The keys of a tensor.
      {"TensorIsAString", file_with(R"({"a":"b"})"), "'a' is the string 'b'"},
      {"TensorIsNull", file_with(R"({"a":null})"), "'a' is null"},
      {"NoDtype", file_with(R"({"a":{"shape":[],"data_offsets":[0,4]}})", 4),
       "dtype is missing"},
      {"NoShape", file_with(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4),
       "shape is missing"},
      {"NoOffsets", file_with(R"({"a":{"dtype":"F32","shape":[1]}})", 4),
       "data_offsets is missing"},
      {"UnknownKey",
       file_with(
           R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"x":1}})", 4),
       "key 'x' is unknown; allowed are dtype, shape and data_offsets"},
      {"DtypeIsANumber", one("32", "[1]", "[0,4]", 4),
       "dtype is the number 32"},
      {"DtypeIsEmpty", one("\"\"", "[1]", "[0,4]", 4), "empty string"},
      {"ShapeIsAString", f32("\"1\"", "[0,4]", 4), "shape is the string '1'"},
      {"ShapeHoldsAString", f32("[\"1\"]", "[0,4]", 4),
       "shape holds the string '1'"},
      {"OffsetsAreANumber", f32("[1]", "4", 4), "data_offsets is the number 4"},
      {"OneOffset", f32("[1]", "[4]", 4), "has 1 numbers"},
      // The numbers.
      {"NegativeShape", f32("[-1]", "[0,4]", 4),
       "shape holds the number -1; allowed are integers from 0"},
      {"FractionalShape", f32("[1.0]", "[0,4]", 4),
       "shape holds the number 1.0"},
      {"ShapeBeyond63Bits", f32("[9223372036854775808]", "[0,4]", 4),
       "number 9223372036854775808"},
      {"ShapeBeyond64Bits", f32("[18446744073709551616]", "[0,4]", 4),
       "number 1.8446744073709552e+19"},
      {"VolumeOverflows", f32("[" + largest + "," + largest + "]", "[0,4]", 4),
       "not a whole number of bytes up to"},
      {"VolumeWrapsToTheRange", f32("[4294967296,4294967296]", "[0,0]", 0),
       "not a whole number of bytes up to"},
      {"OverflowBehindAZero",
       f32("[0," + largest + "," + largest + "]", "[0,0]", 0),
       "not a whole number of bytes up to"},
      {"TooManyDims", f32("[1" + ones + "]", "[0,4]", 4),
       "more than 64 dimensions"},
      {"NegativeOffset", f32("[1]", "[-4,0]", 4),
       "data_offsets holds the number -4"},
      {"OffsetBeyond63Bits", f32("[1]", "[0,18446744073709551615]", 4),
       "number 18446744073709551615"},
      {"OffsetsBackwards", f32("[1]", "[4,0]", 4), "run backwards"},
      // The ranges.
      {"RangeTooLarge", f32("[1]", "[0,8]", 8),
       "[0, 8] are 8 bytes, shape [1] of F32 needs 4"},
      {"RangeTooSmall", one("\"F64\"", "[1]", "[0,4]", 4), "needs 8"},
      {"UnsupportedRange", one("\"U8\"", "[3]", "[0,4]", 4), "needs 3"},
      {"HalfABytes", one("\"F4\"", "[3]", "[0,2]", 2),
       "not a whole number of bytes"},
      {"DataCutShort", f32("[2]", "[0,8]", 7),
       "[0, 8] reach past the end of the data (7 bytes)"},
      {"NoData", f32("[2]", "[0,8]", 0), "the file is cut short"},
      {"TrailingBytes", f32("[1]", "[0,4]", 5),
       "1 bytes follow the last tensor"},
      {"DataWithoutTensors", file_with("{}", 3), "3 bytes follow"},
      {"HoleInFront", f32("[1]", "[4,8]", 8),
       "bytes 0 to 4 of the data, before tensor 'a', belong to no tensor"},
      {"HoleBetween", two("[0,4]", "[8,12]", 12), "bytes 4 to 8"},
      {"Overlap", two("[0,4]", "[2,6]", 6),
       "'b': data_offsets [2, 6] overlap the tensor before"},
      {"SameRange", two("[0,4]", "[0,4]", 4), "overlap"},
      // The metadata.
      {"MetadataIsNull", file_with(R"({"__metadata__":null})"),
       "__metadata__ is null"},
      {"MetadataIsAString", file_with(R"({"__metadata__":"pt"})"),
       "must be an object of strings"},
      {"MetadataHoldsANumber", file_with(R"({"__metadata__":{"n":1}})"),
       "metadata 'n' is the number 1; it must be a string"},
      {"MetadataKeyTwice", file_with(R"({"__metadata__":{"n":"1","n":"2"}})"),
       "'n' appears twice"},
  };
  return cases;
}

class SafetensorsMalformed : public ::testing::TestWithParam<Malformed> {};

TEST_P(SafetensorsMalformed, IsRefusedWithASentence) {
  const std::string message = error_of([&] { read(GetParam().bytes); });
  EXPECT_THAT(message,
              AllOf(StartsWith("x.safetensors: "), HasSubstr(GetParam().says)));
  EXPECT_LT(message.size(), 600u);
}

INSTANTIATE_TEST_SUITE_P(Files, SafetensorsMalformed,
                         ::testing::ValuesIn(malformed_files()),
                         [](const ::testing::TestParamInfo<Malformed>& info) {
                           return info.param.kind;
                         });

TEST(SafetensorsReader, EveryCutOfAGoodFileIsRefused) {
  const std::string good = two("[0,4]", "[4,8]", 8);
  EXPECT_EQ(read(good).entries().size(), 2u);
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_NE(error_of([&] { read(good.substr(0, size)); }), "") << size;
  }
}

TEST(SafetensorsReader, EntriesComeInTheOrderOfTheirBytes) {
  const std::string bytes = two("[4,8]", "[0,4]", 8);
  const SafetensorsFile file = read(bytes);
  ASSERT_EQ(file.entries().size(), 2u);
  EXPECT_EQ(file.entries()[0].name, "b");
  EXPECT_EQ(file.entries()[1].name, "a");
  EXPECT_EQ(file.data(file.find("a")), bytes.data() + bytes.size() - 4);
}

TEST(SafetensorsReader, EmptyTensorsMayStandAnywhereBetweenOthers) {
  const std::string header = std::string("{") +
                             tensor("\"F32\"", "[1]", "[0,4]") + "," +
                             tensor("\"F32\"", "[0]", "[0,0]", "front") + "," +
                             tensor("\"F32\"", "[2,0]", "[4,4]", "back") + "}";
  const std::string bytes = file_with(header, 4);
  EXPECT_EQ(read(bytes).entries().size(), 3u);
  const std::string inside =
      file_with(std::string("{") + tensor("\"F32\"", "[1]", "[0,4]") + "," +
                    tensor("\"F32\"", "[0]", "[2,2]", "inside") + "}",
                4);
  EXPECT_THAT(error_of([&] { read(inside); }), HasSubstr("overlap"));
}

TEST(SafetensorsReader, ScalarHasNoDims) {
  const SafetensorsFile file = read(one("\"F64\"", "[]", "[0,8]", 8));
  EXPECT_TRUE(file.find("a").shape.empty());
}

TEST(SafetensorsReader, TrailingSpacesOfTheHeaderAreAllowed) {
  EXPECT_TRUE(read(file_with("{}   ")).entries().empty());
}

TEST(SafetensorsReader, UnsupportedTypesAreListedButNotHandedOut) {
  for (const char* type : {"BOOL", "U8", "F8_E4M3", "FROM_THE_FUTURE"}) {
    const std::string bytes =
        one(std::string("\"") + type + "\"", "[4]", "[0,4]", 4);
    const SafetensorsFile file = read(bytes);
    ASSERT_EQ(file.entries().size(), 1u);
    const SafetensorsEntry& entry = file.entries()[0];
    EXPECT_FALSE(entry.supported);
    EXPECT_EQ(entry.type_name, type);
    EXPECT_TRUE(file.contains("a"));
    const auto names_both =
        AllOf(HasSubstr("tensor 'a' has dtype '" + std::string(type) + "'"),
              HasSubstr("supported are F64, F32"));
    EXPECT_THAT(error_of([&] { file.find("a"); }), names_both);
    EXPECT_THAT(error_of([&] { file.data(entry); }), names_both);
  }
}

TEST(SafetensorsReader, MissingTensorIsNamed) {
  const SafetensorsFile file = read(kGood);
  EXPECT_FALSE(file.contains("b"));
  EXPECT_EQ(error_of([&] { file.find("b"); }),
            "x.safetensors: there is no tensor 'b' among its 1 tensors, the "
            "first of which is 'a'");
}

TEST(SafetensorsReader, EntryOfAnotherFileIsRefused) {
  const SafetensorsFile file = read(kGood);
  SafetensorsEntry foreign = file.entries()[0];
  foreign.end = 100;
  EXPECT_THAT(error_of([&] { file.data(foreign); }),
              HasSubstr("is not from this file"));
}

TEST(SafetensorsReader, HostileNamesAreEscapedAndCutInMessages) {
  const std::string message = error_of([&] {
    read(file_with("{\"" + std::string(5000, 'n') + "\\u001b[2J\":1}"));
  });
  EXPECT_THAT(message, HasSubstr("nnn...'"));
  EXPECT_LT(message.size(), 300u);
  EXPECT_THAT(error_of([&] { read(file_with("{\"\\u001b[2J\":1}")); }),
              HasSubstr("'\\x1b[2J'"));
}

TEST(SafetensorsReader, PathsThatAreNoFilesAreRefused) {
  const TempFolder folder;
  const auto open = [](const std::string& path) {
    return error_of([&] { SafetensorsFile::open(path); });
  };
  EXPECT_EQ(
      open(folder / "none"),
      folder / "none" + ": cannot open for reading: No such file or directory");
  EXPECT_EQ(open(folder.path()), folder.path() + ": is a folder; give a file");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(open(folder / "pipe"), HasSubstr("is not an ordinary file"));
  EXPECT_THAT(open("/dev/zero"), HasSubstr("is not an ordinary file"));
  write_bytes(folder / "empty", "");
  EXPECT_THAT(open(folder / "empty"), HasSubstr("has 0 bytes"));
  EXPECT_NE(open(std::string("a\0b", 3)), "");
}

TEST(SafetensorsReader, ALyingLengthCostsNothing) {
  // A sparse file: 99 MB of header that is not there but for its length.
  const TempFolder folder;
  const std::string path = folder / "sparse";
  write_bytes(path, file_bytes(99000000, "{"));
  std::filesystem::resize_file(path, 99000008);
  EXPECT_THAT(error_of([&] { SafetensorsFile::open(path); }),
              HasSubstr("byte 1 is zero"));
}

TEST(SafetensorsReader, CopiesShareTheMapping) {
  const TempFolder folder;
  write_bytes(folder / "f", kGood);
  auto first =
      std::make_unique<SafetensorsFile>(SafetensorsFile::open(folder / "f"));
  const SafetensorsFile second = *first;
  const void* data = second.data(second.find("a"));
  first.reset();
  EXPECT_EQ(std::memcmp(data, "dddd", 4), 0);
}

}  // namespace
}  // namespace shardbook
