#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "core/safetensors.h"
#include "tests/io/support.h"

namespace shardbook {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kManifest = "model.safetensors.index.json";

const float kNumbers[8] = {0, 1, 2, 3, 4, 5, 6, 7};

/// Tensors a to d of 2, 1, 4 and 1 floats.
std::vector<SafetensorsItem> four_items() {
  return {{"a", DType::kF32, {2}, kNumbers},
          {"b", DType::kF32, {}, kNumbers + 2},
          {"c", DType::kF32, {2, 2}, kNumbers + 3},
          {"d", DType::kF32, {1}, kNumbers + 7}};
}

/// The four in three files, and their manifest.
void write_sharded(const TempFolder& folder) {
  const std::vector<SafetensorsItem> items = four_items();
  const SafetensorsMetadata metadata = {{"format", "pt"}};
  write_safetensors(folder / "1.safetensors", {items[0], items[1]}, metadata);
  write_safetensors(folder / "2.safetensors", {items[2]}, metadata);
  write_safetensors(folder / "3.safetensors", {items[3]}, metadata);
  write_bytes(folder / kManifest,
              R"({"metadata":{"total_size":32},"weight_map":{)"
              R"("a":"1.safetensors","b":"1.safetensors",)"
              R"("c":"2.safetensors","d":"3.safetensors"}})");
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
  write_sharded(folder);
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
  write_sharded(folder);
  std::filesystem::remove(folder / "2.safetensors");
  EXPECT_THAT(error_of([&] { CheckpointReader::open(folder.path()); }),
              StartsWith(folder / "2.safetensors: cannot open for reading"));
}

TEST(Checkpoint, ABrokenPromiseOfTheManifestIsNamed) {
  const TempFolder folder;
  write_safetensors(folder / "one.safetensors", four_items());
  write_bytes(folder / kManifest, R"({"weight_map":{"z":"one.safetensors"}})");
  EXPECT_THAT(error_of([&] { CheckpointReader::open(folder.path()); }),
              HasSubstr("weight_map promises tensor 'z' in 'one.safetensors', "
                        "which does not hold it"));
}

TEST(Checkpoint, TensorsThatTheManifestOmitsAreNotListed) {
  const TempFolder folder;
  write_safetensors(folder / "one.safetensors", four_items());
  write_bytes(folder / kManifest, R"({"weight_map":{"c":"one.safetensors"}})");
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
        BadManifest{"Array", "[]", "the manifest is an array"},
        BadManifest{"NoWeightMap", "{}", "weight_map is missing"},
        BadManifest{"WeightMapIsAnArray", R"({"weight_map":[]})",
                    "weight_map is an array"},
        BadManifest{"WeightMapIsNull", R"({"weight_map":null})",
                    "weight_map is null"},
        BadManifest{"TensorTwice", R"({"weight_map":{"a":"f","a":"g"}})",
                    "'a' appears twice"},
        BadManifest{"FileIsANumber", R"({"weight_map":{"a":1}})",
                    "tensor 'a' in weight_map is the number 1"},
        BadManifest{"FileElsewhere", R"({"weight_map":{"a":"../f"}})",
                    "name of a file beside the manifest"},
        BadManifest{"FileAbsolute", R"({"weight_map":{"a":"/etc/f"}})",
                    "name of a file beside the manifest"},
        BadManifest{"FileIsAFolder", R"({"weight_map":{"a":".."}})",
                    "name of a file beside the manifest"}),
    [](const ::testing::TestParamInfo<BadManifest>& info) {
      return info.param.kind;
    });

TEST(SafetensorsIndex, WhatElseAManifestSaysIsPassedOver) {
  const std::string text =
      R"({"metadata":{"total_size":12,"x":[{"total_size":5}],"y":null},)"
      R"("other":{"weight_map":{"q":1}},"weight_map":{"a":"f"}})";
  const SafetensorsIndex index =
      parse_safetensors_index(text.data(), text.size(), "m.json");
  EXPECT_EQ(index, (SafetensorsIndex{{"a", "f"}}));
}

}  // namespace
}  // namespace shardbook
