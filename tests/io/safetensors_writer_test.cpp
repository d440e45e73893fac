#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <numeric>

#include "core/internal/files.h"
#include "core/safetensors.h"
#include "tests/io/support.h"
#include "tests/support/dtypes.h"

namespace shardbook {
namespace {

using ::testing::AllOf;
using testing::file_bytes;
using ::testing::HasSubstr;
using testing::num_files;
using ::testing::StartsWith;

std::string bytes_of(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry& entry = file.find(name);
  return std::string(static_cast<const char*>(file.data(entry)),
                     entry.end - entry.begin);
}

TEST(SafetensorsWriter, GoldenBytes) {
  const TempFolder folder;
  const float weight[2] = {1.0f, -2.0f};
  const std::int32_t step = 7;
  write_safetensors(
      folder / "f",
      {{"w", DType::kF32, {2, 1}, weight}, {"step", DType::kI32, {}, &step}},
      {{"format", "pt"}});
  const std::string header =
      R"({"__metadata__":{"format":"pt"},)"
      R"("w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
      R"("step":{"dtype":"I32","shape":[],"data_offsets":[8,12]}} )";
  ASSERT_EQ(header.size(), 144u);
  const std::string data("\x00\x00\x80\x3f\x00\x00\x00\xc0\x07\x00\x00\x00",
                         12);
  EXPECT_EQ(read_bytes(folder / "f"), file_bytes(144, header + data));
}

TEST(SafetensorsWriter, AKilledProcessLeavesNothingBehind) {
  const TempFolder folder;
  const int nameless = open(folder.path().c_str(), O_WRONLY | O_TMPFILE, 0600);
  if (nameless < 0) GTEST_SKIP() << "no files without a name here";
  close(nameless);
  const pid_t pid = fork();
  if (pid == 0) {
    internal::AtomicFile file(folder / "f");
    file.write("half", 4);
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(num_files(folder), 0);
}

TEST(SafetensorsWriter, NoTensorsIsAFile) {
  const TempFolder folder;
  write_safetensors(folder / "f", {});
  EXPECT_EQ(read_bytes(folder / "f"), file_bytes(8, "{}      "));
  EXPECT_TRUE(SafetensorsFile::open(folder / "f").entries().empty());
}

// Under any name, and aligned to its element even behind an odd one.
TEST(SafetensorsWriter, EveryTypeAndShapeComesBack) {
  const TempFolder folder;
  const std::vector<std::vector<std::int64_t>> shapes = {
      {}, {1}, {3}, {0}, {2, 0, 3}, {2, 3, 5}, {1, 1, 1, 1, 7}};
  std::string data(1000, '\0');
  std::iota(data.begin(), data.end(), 1);
  const std::string names[] = {"a\"b\\c", "\n", std::string("z\0z", 3),
                               "\xe6\xa2\xaf\xe5\xba\xa6"};
  std::vector<SafetensorsItem> items = {{"odd", DType::kF16, {3}, data.data()}};
  for (const DType dtype : kAllDTypes) {
    for (const auto& shape : shapes) {
      const std::string name =
          names[items.size() % 4] + std::to_string(items.size());
      items.push_back({name, dtype, shape, data.data() + items.size()});
    }
  }
  const SafetensorsMetadata metadata = {
      {"format", "pt"}, {"config", "{\"n\": \"\n\t\"}"}, {"", "\xc3\xa9"}};
  write_safetensors(folder / "f", items, metadata);

  const SafetensorsFile file = SafetensorsFile::open(folder / "f");
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.entries().size(), items.size());
  for (const SafetensorsItem& item : items) {
    const SafetensorsEntry& entry = file.find(item.name);
    EXPECT_EQ(entry.dtype, item.dtype);
    EXPECT_EQ(entry.shape, item.shape);
    const auto address = reinterpret_cast<std::uintptr_t>(file.data(entry));
    EXPECT_EQ(address % dtype_bytes(entry.dtype), 0u) << entry.name;
    const std::string bytes = bytes_of(file, item.name);
    EXPECT_EQ(std::memcmp(bytes.data(), item.data, bytes.size()), 0);
  }
}

TEST(SafetensorsWriter, ImpossibleItemsAreRefusedBeforeAnythingIsWritten) {
  const TempFolder folder;
  const std::string path = folder / "f";
  const float x = 0;
  const auto fails = [&](const std::vector<SafetensorsItem>& items,
                         const SafetensorsMetadata& metadata = {}) {
    const std::string message =
        error_of([&] { write_safetensors(path, items, metadata); });
    EXPECT_EQ(num_files(folder), 0);
    EXPECT_THAT(message, StartsWith(path + ": "));
    return message;
  };
  const std::int64_t huge = std::int64_t{1} << 40;
  EXPECT_THAT(fails({{"", DType::kF32, {}, &x}}), HasSubstr("empty name"));
  EXPECT_THAT(fails({{"__metadata__", DType::kF32, {}, &x}}),
              HasSubstr("reserved"));
  EXPECT_THAT(fails({{"a", DType::kF32, {}, &x}, {"a", DType::kF32, {}, &x}}),
              HasSubstr("'a' is given twice"));
  EXPECT_THAT(fails({{"a", DType::kF32, {-1}, &x}}),
              HasSubstr("shape [-1] of F32 has a negative"));
  EXPECT_THAT(fails({{"a", DType::kF32, {huge, huge}, &x}}),
              HasSubstr("too large"));
  EXPECT_THAT(fails({{"a", DType::kF32, std::vector<std::int64_t>(65, 1), &x}}),
              HasSubstr("65 dimensions; allowed are up to 64"));
  EXPECT_THAT(fails({{"\xff", DType::kF32, {}, &x}}),
              HasSubstr("'\\xff' is not valid UTF-8"));
  EXPECT_THAT(fails({}, {{"k", "\xff"}}), HasSubstr("not valid UTF-8"));
  EXPECT_THAT(fails({{"a", DType::kF32, {2}, nullptr}}),
              HasSubstr("'a' has no data, but needs 8 bytes"));
}

TEST(SafetensorsWriter, WithoutCommitNothingIsLeft) {
  const TempFolder folder;
  write_bytes(folder / "f", "old");
  internal::AtomicFile(folder / "f").write("half", 4);
  EXPECT_EQ(num_files(folder), 1);
  EXPECT_EQ(read_bytes(folder / "f"), "old");
}

TEST(SafetensorsWriter, ReadersKeepTheFileTheyOpened) {
  const TempFolder folder;
  const float one = 1, two = 2;
  write_safetensors(folder / "f", {{"a", DType::kF32, {}, &one}});
  const SafetensorsFile before = SafetensorsFile::open(folder / "f");
  write_safetensors(folder / "f", {{"a", DType::kF32, {}, &two}});
  const SafetensorsFile after = SafetensorsFile::open(folder / "f");
  EXPECT_EQ(*static_cast<const float*>(before.data(before.find("a"))), one);
  EXPECT_EQ(*static_cast<const float*>(after.data(after.find("a"))), two);
}

TEST(SafetensorsWriter, ALinkIsFollowed) {
  const TempFolder folder;
  write_bytes(folder / "real", "old");
  std::filesystem::create_symlink("real", folder / "link");
  write_safetensors(folder / "link", {});
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_TRUE(SafetensorsFile::open(folder / "real").entries().empty());
  std::filesystem::create_symlink("nowhere", folder / "dangling");
  EXPECT_THAT(error_of([&] { write_safetensors(folder / "dangling", {}); }),
              HasSubstr("cannot follow the link"));
}

TEST(SafetensorsWriter, TheNameMayBeAsLongAsTheFileSystemAllows) {
  const TempFolder folder;
  const std::string path = folder / std::string(255, 'n');
  write_safetensors(path, {});
  EXPECT_TRUE(std::filesystem::exists(path));
  EXPECT_THAT(error_of([&] { write_safetensors(path + "n", {}); }),
              HasSubstr("File name too long"));
  EXPECT_EQ(num_files(folder), 1);
}

TEST(SafetensorsWriter, PathsThatCannotBeFilesAreRefused) {
  const TempFolder folder;
  const auto fails = [](const std::string& path) {
    return error_of([&] { write_safetensors(path, {}); });
  };
  EXPECT_THAT(fails(folder.path()), HasSubstr("it is a folder"));
  EXPECT_THAT(fails("/dev/null"), HasSubstr("not an ordinary file"));
  EXPECT_EQ(fails(folder / "no/f"),
            folder / "no/f" +
                ": cannot create a file in this folder: "
                "No such file or directory");
  EXPECT_THAT(fails(""), HasSubstr("empty path"));
  EXPECT_EQ(num_files(folder), 0);
}

/// Expects that writing 1 MiB to folder/f fails for `cause` and changes
/// nothing.
void expect_old_file_survives(const std::string& folder,
                              const std::string& cause) {
  const std::string path = folder + "/f";
  const std::string old = read_bytes(path);
  const std::string data(1 << 20, 'd');
  const std::string message = error_of([&] {
    write_safetensors(path, {{"a", DType::kF64, {1 << 17}, data.data()}});
  });
  EXPECT_THAT(message, AllOf(StartsWith(path + ": cannot "), HasSubstr(cause)));
  EXPECT_EQ(read_bytes(path), old);
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    EXPECT_EQ(file.path().filename(), "f");
  }
}

TEST(SafetensorsWriter, AFileTooLargeLeavesTheOldOne) {
  const TempFolder folder;
  write_bytes(folder / "f", "old");
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 100000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_old_file_survives(folder.path(), "write: File too large");
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
}

/// A small file system in memory; mounted() is false where that is forbidden.
class SmallDisk {
 public:
  SmallDisk()
      : mounted_(::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0,
                         "size=64k") == 0) {}
  ~SmallDisk() {
    if (mounted_) ::umount2(folder_.path().c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  const std::string& path() const { return folder_.path(); }
  bool make_read_only() {
    return ::mount("", folder_.path().c_str(), "", MS_REMOUNT | MS_RDONLY,
                   "") == 0;
  }

 private:
  TempFolder folder_;
  bool mounted_;
};

TEST(SafetensorsWriter, AFullDiskLeavesTheOldFile) {
  const SmallDisk disk;
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small disk needs root";
  write_bytes(disk.path() + "/f", "old");
  expect_old_file_survives(disk.path(), "write: No space left on device");
}

TEST(SafetensorsWriter, AReadOnlyDiskLeavesTheOldFile) {
  SmallDisk disk;
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small disk needs root";
  write_bytes(disk.path() + "/f", "old");
  if (!disk.make_read_only()) GTEST_SKIP() << "cannot remount read-only";
  expect_old_file_survives(disk.path(), "Read-only file system");
}

TEST(SafetensorsWriter, AFolderWithoutPermissionLeavesTheOldFile) {
  const TempFolder folder;
  write_bytes(folder / "f", "old");
  ASSERT_EQ(::chmod(folder.path().c_str(), 0555), 0);
  // Permissions do not bind root: be nobody for a moment.
  constexpr uid_t kNobody = 65534;
  const uid_t self = ::geteuid();
  if (self == 0 && ::seteuid(kNobody) != 0) {
    GTEST_SKIP() << "root cannot become nobody here";
  }
  expect_old_file_survives(folder.path(), "Permission denied");
  const bool restored = self != 0 || ::seteuid(self) == 0;
  ASSERT_TRUE(restored);
  ::chmod(folder.path().c_str(), 0755);
}

}  // namespace
}  // namespace shardbook
