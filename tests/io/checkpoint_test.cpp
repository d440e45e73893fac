#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "core/safetensors.h"
#include "tests/io/support.h"

namespace shardbook {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::num_files;
using testing::read_bytes;
using ::testing::StartsWith;
using testing::write_bytes;

constexpr const char* kManifest = "model.safetensors.index.json";

const float kNumbers[8] = {0, 1, 2, 3, 4, 5, 6, 7};

/// Tensors a to d of 2, 1, 4 and 1 floats.
std::vector<SafetensorsItem> four_items() {
  return {{"a", DType::kF32, {2}, kNumbers},
          {"b", DType::kF32, {}, kNumbers + 2},
          {"c", DType::kF32, {2, 2}, kNumbers + 3},
          {"d", DType::kF32, {1}, kNumbers + 7}};
}

void expect_four(const CheckpointReader& reader) {
  EXPECT_THAT(reader.names(), ElementsAre("a", "b", "c", "d"));
  EXPECT_EQ(reader.metadata(), (SafetensorsMetadata{{"format", "pt"}}));
  for (const SafetensorsItem& item : four_items()) {
    const SafetensorsEntry& entry = reader.find(item.name);
    EXPECT_EQ(entry.shape, item.shape);
    EXPECT_EQ(
        std::memcmp(reader.data(item.name), item.data, entry.end - entry.begin),
        0);
  }
  EXPECT_FALSE(reader.contains("e"));
  EXPECT_THAT(error_of([&] { reader.find("e"); }),
              HasSubstr("no tensor 'e' among the 4 tensors"));
}

TEST(Checkpoint, OneFileIsFoundByFileFolderAndStem) {
  const TempFolder folder;
  write_safetensors(folder / "model.safetensors", four_items(),
                    {{"format", "pt"}});
  expect_four(CheckpointReader::open(folder / "model.safetensors"));
  expect_four(CheckpointReader::open(folder.path()));
  expect_four(CheckpointReader::open(folder / "model"));
}

TEST(Checkpoint, ManyFilesAreFoundByManifestFolderAndStem) {
  const TempFolder folder;
  write_sharded_safetensors(folder.path(), four_items(), 12,
                            {{"format", "pt"}});
  // a and b share 12 bytes, c has 16 and stands alone.
  EXPECT_EQ(num_files(folder), 4);
  EXPECT_EQ(read_bytes(folder / kManifest), R"({
  "metadata": {
    "total_size": 32
  },
  "weight_map": {
    "a": "model-00001-of-00003.safetensors",
    "b": "model-00001-of-00003.safetensors",
    "c": "model-00002-of-00003.safetensors",
    "d": "model-00003-of-00003.safetensors"
  }
}
)");
  expect_four(CheckpointReader::open(folder / kManifest));
  expect_four(CheckpointReader::open(folder.path()));
  expect_four(CheckpointReader::open(folder / "model"));
}

TEST(Checkpoint, ShardNamesCountFromOne) {
  EXPECT_EQ(safetensors_shard_name("model", 1, 5),
            "model-00002-of-00005.safetensors");
  EXPECT_NE(error_of([] { safetensors_shard_name("model", 5, 5); }), "");
  EXPECT_NE(error_of([] { safetensors_shard_name("model", -1, 5); }), "");
}

TEST(Checkpoint, AMissingShardIsNamed) {
  const TempFolder folder;
  write_sharded_safetensors(folder.path(), four_items(), 12);
  std::filesystem::remove(folder / "model-00002-of-00003.safetensors");
  EXPECT_EQ(error_of([&] { CheckpointReader::open(folder.path()); }),
            folder / "model-00002-of-00003.safetensors" +
                ": cannot open for reading: No such file or directory");
}

TEST(Checkpoint, ABrokenPromiseOfTheManifestIsNamed) {
  const TempFolder folder;
  write_safetensors(folder / "one.safetensors", four_items());
  write_safetensors_index(folder / kManifest, {-1, {{"z", "one.safetensors"}}});
  EXPECT_THAT(error_of([&] { CheckpointReader::open(folder.path()); }),
              HasSubstr("weight_map promises tensor 'z' in 'one.safetensors', "
                        "which does not hold it"));
}

TEST(Checkpoint, TensorsThatTheManifestOmitsAreNotListed) {
  const TempFolder folder;
  write_safetensors(folder / "one.safetensors", four_items());
  write_safetensors_index(folder / kManifest, {-1, {{"c", "one.safetensors"}}});
  const CheckpointReader reader = CheckpointReader::open(folder.path());
  EXPECT_THAT(reader.names(), ElementsAre("c"));
  EXPECT_FALSE(reader.contains("a"));
}

TEST(Checkpoint, NothingThereIsASentence) {
  const TempFolder folder;
  EXPECT_THAT(error_of([&] { CheckpointReader::open(folder.path()); }),
              HasSubstr("this folder holds neither model.safetensors nor"));
  EXPECT_THAT(error_of([&] { CheckpointReader::open(folder / "x"); }),
              StartsWith(folder / "x: there is no such checkpoint"));
}

struct BadManifest {
  std::string kind;
  std::string text;
  std::string says;
};

class MalformedManifest : public ::testing::TestWithParam<BadManifest> {};

TEST_P(MalformedManifest, IsRefusedWithASentence) {
  const BadManifest& bad = GetParam();
  const std::string message = error_of([&] {
    parse_safetensors_index(bad.text.data(), bad.text.size(), "m.json");
  });
  EXPECT_THAT(message, StartsWith("m.json: "));
  EXPECT_THAT(message, HasSubstr(bad.says));
}

INSTANTIATE_TEST_SUITE_P(
    Manifests, MalformedManifest,
    ::testing::Values(
        BadManifest{"Empty", "", "not valid JSON"},
        BadManifest{"CutShort", R"({"weight_map":{)", "not valid JSON"},
        BadManifest{"ZeroByte", std::string("{}\0", 3), "byte 2 is zero"},
        BadManifest{"Array", "[]", "the manifest is an array"},
        BadManifest{"Number", "1", "the manifest is the number 1"},
        BadManifest{"NoWeightMap", "{}", "weight_map is missing"},
        BadManifest{"WeightMapIsAnArray", R"({"weight_map":[]})",
                    "weight_map is an array"},
        BadManifest{"WeightMapIsNull", R"({"weight_map":null})",
                    "weight_map is null"},
        BadManifest{"WeightMapTwice", R"({"weight_map":{},"weight_map":{}})",
                    "'weight_map' appears twice"},
        BadManifest{"TensorTwice", R"({"weight_map":{"a":"f","a":"g"}})",
                    "'a' appears twice"},
        BadManifest{"FileIsANumber", R"({"weight_map":{"a":1}})",
                    "tensor 'a' in weight_map is the number 1"},
        BadManifest{"FileIsAnObject", R"({"weight_map":{"a":{}}})",
                    "is an object"},
        BadManifest{"FileElsewhere", R"({"weight_map":{"a":"../f"}})",
                    "name of a file beside the manifest"},
        BadManifest{"FileAbsolute", R"({"weight_map":{"a":"/etc/f"}})",
                    "name of a file beside the manifest"},
        BadManifest{"FileIsAFolder", R"({"weight_map":{"a":".."}})",
                    "name of a file beside the manifest"},
        BadManifest{"DeepNesting", R"({"x":)" + std::string(100000, '['),
                    "nests deeper than 64"}),
    [](const ::testing::TestParamInfo<BadManifest>& info) {
      return info.param.kind;
    });

TEST(SafetensorsIndex, WhatElseAManifestSaysIsPassedOver) {
  const std::string text =
      R"({"metadata":{"total_size":12,"x":[{"total_size":5}],"y":null},)"
      R"("other":{"weight_map":{"q":1}},"weight_map":{"a":"f"}})";
  const SafetensorsIndex index =
      parse_safetensors_index(text.data(), text.size(), "m.json");
  EXPECT_EQ(index.total_size, 12);
  EXPECT_EQ(index.weight_map, (std::map<std::string, std::string>{{"a", "f"}}));
}

TEST(SafetensorsIndex, TotalSizeMayBeMissingOrAFraction) {
  for (const std::string text :
       {R"({"weight_map":{}})",
        R"({"metadata":{"total_size":1.5e9},"weight_map":{}})"}) {
    EXPECT_EQ(
        parse_safetensors_index(text.data(), text.size(), "m.json").total_size,
        -1);
  }
}

TEST(SafetensorsIndex, ImpossibleManifestsAreNotWritten) {
  const TempFolder folder;
  EXPECT_THAT(
      error_of([&] {
        write_safetensors_index(folder / kManifest, {0, {{"a", "../f"}}});
      }),
      HasSubstr("beside the manifest"));
  EXPECT_THAT(
      error_of([&] {
        write_safetensors_index(folder / kManifest, {0, {{"\xff", "f"}}});
      }),
      HasSubstr("not valid UTF-8"));
  EXPECT_THAT(error_of([&] {
                write_sharded_safetensors(folder.path(), four_items(), 0);
              }),
              HasSubstr("allowed are 1 and more"));
  EXPECT_EQ(num_files(folder), 0);
}

}  // namespace
}  // namespace shardbook
