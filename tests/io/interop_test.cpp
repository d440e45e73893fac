// Files go to and from the reference implementation, where a Python with the
// `safetensors` package is found.

#include <gtest/gtest.h>

#include <cstdlib>

#include "core/safetensors.h"
#include "tests/io/support.h"

namespace shardbook {
namespace {

/// Runs a script with one argument; true when it exits with status 0.
bool run_python(const std::string& python, const std::string& script,
                const std::string& argument) {
  const std::string command =
      "'" + python + "' '" + script + "' '" + argument + "'";
  return std::system(command.c_str()) == 0;
}

/// A Python that imports `package`, or "".
std::string python_with(const std::string& package) {
  const char* chosen = std::getenv("SHARDBOOK_PYTHON");
  for (const char* python : {chosen, "python3", "/usr/bin/python3"}) {
    if (python == nullptr) continue;
    const std::string command = std::string("'") + python + "' -c 'import " +
                                package + "' >/dev/null 2>&1";
    if (std::system(command.c_str()) == 0) return python;
  }
  return "";
}

constexpr const char* kNoPackage =
    "no Python with safetensors: set SHARDBOOK_PYTHON to one that has it";

TEST(SafetensorsInterop, TheReferenceReadsWhatWeWrite) {
  const std::string python = python_with("safetensors");
  if (python.empty()) GTEST_SKIP() << kNoPackage;
  const TempFolder folder;
  const std::string data("0123456789abcdef0123456789abcdef");
  write_safetensors(folder / "f.safetensors",
                    {{"half", DType::kF16, {3}, data.data()},
                     {"brain", DType::kBF16, {1, 3}, data.data()},
                     {"f", DType::kF32, {2, 2}, data.data()},
                     {"d", DType::kF64, {}, data.data()},
                     {"l", DType::kI64, {2, 1}, data.data()},
                     {"i", DType::kI32, {1}, data.data()},
                     {"none", DType::kF32, {0, 4}, nullptr},
                     {"\xc3\xa9\"\n", DType::kF32, {1}, data.data()}},
                    {{"format", "pt"}, {"config", "{\"n\": 1}"}});
  write_bytes(folder / "read.py", R"(
import safetensors, sys
data = b"0123456789abcdef0123456789abcdef"
path = sys.argv[1] + "/f.safetensors"
expected = {"half": ("F16", [3], 6), "brain": ("BF16", [1, 3], 6),
            "f": ("F32", [2, 2], 16), "d": ("F64", [], 8),
            "l": ("I64", [2, 1], 16), "i": ("I32", [1], 4),
            "none": ("F32", [0, 4], 0), "\u00e9\"\n": ("F32", [1], 4)}
found = dict(safetensors.deserialize(open(path, "rb").read()))
assert set(found) == set(expected), found
for name, (dtype, shape, size) in expected.items():
    entry = found[name]
    assert entry["dtype"] == dtype and list(entry["shape"]) == shape, entry
    assert bytes(entry["data"]) == data[:size], entry
)");
  EXPECT_TRUE(run_python(python, folder / "read.py", folder.path()));
}

TEST(SafetensorsInterop, WeReadWhatTheReferenceWrites) {
  const std::string python = python_with("safetensors");
  if (python.empty()) GTEST_SKIP() << kNoPackage;
  const TempFolder folder;
  write_bytes(folder / "write.py", R"(
import ctypes, safetensors, sys
buffers = []  # newer versions take addresses: keep the bytes alive
def entry(dtype, shape, data):
    if not hasattr(safetensors, "TensorSpec"):
        return {"dtype": dtype, "shape": shape, "data": data}
    buffers.append(ctypes.create_string_buffer(data, len(data) + 1))
    return safetensors.TensorSpec(dtype=dtype, shape=shape,
                                  data_ptr=ctypes.addressof(buffers[-1]),
                                  data_len=len(data))
safetensors.serialize_file(
    {"i": entry("int32", [2], b"abcdefgh"), "d": entry("float64", [], b"12345678"),
     "flags": entry("bool", [3], b"\0\1\0"), "none": entry("float32", [0], b""),
     "brain": entry("bfloat16", [1, 2], b"wxyz"),
     "\u00e9\"\n": entry("float16", [1], b"hh")},
    sys.argv[1] + "/f.safetensors", {"format": "pt", "quote": "\"\n\u00e9"})
)");
  ASSERT_TRUE(run_python(python, folder / "write.py", folder.path()));
  const SafetensorsFile file = SafetensorsFile::open(folder / "f.safetensors");
  EXPECT_EQ(file.metadata(),
            (SafetensorsMetadata{{"format", "pt"}, {"quote", "\"\n\xc3\xa9"}}));
  EXPECT_EQ(file.entries().size(), 6u);
  EXPECT_FALSE(file.contains("other"));
  EXPECT_THROW(file.find("flags"), Error);
  const auto expect = [&](const std::string& name, DType dtype,
                          const std::vector<std::int64_t>& shape,
                          const std::string& bytes) {
    const SafetensorsEntry& entry = file.find(name);
    EXPECT_EQ(entry.dtype, dtype) << name;
    EXPECT_EQ(entry.shape, shape) << name;
    EXPECT_EQ(std::string(static_cast<const char*>(file.data(entry)),
                          entry.end - entry.begin),
              bytes);
  };
  expect("i", DType::kI32, {2}, "abcdefgh");
  expect("d", DType::kF64, {}, "12345678");
  expect("none", DType::kF32, {0}, "");
  expect("brain", DType::kBF16, {1, 2}, "wxyz");
  expect("\xc3\xa9\"\n", DType::kF16, {1}, "hh");
}

TEST(SafetensorsInterop, TorchLoadsAndSavesTheSameValues) {
  const std::string python = python_with("torch, safetensors.torch");
  if (python.empty()) {
    GTEST_SKIP() << "no Python with torch and safetensors: set "
                    "SHARDBOOK_PYTHON to one that has them";
  }
  const TempFolder folder;
  const float weight[3] = {1.5f, -2.0f, 0.25f};
  const std::uint16_t brain[3] = {0x3f80, 0xc000, 0x3e80};  // 1, -2, 0.25
  const std::int64_t step = 1LL << 40;
  write_safetensors(folder / "model.safetensors",
                    {{"brain", DType::kBF16, {3}, brain},
                     {"weight", DType::kF32, {3, 1}, weight},
                     {"step", DType::kI64, {}, &step}});
  write_bytes(folder / "check.py", R"(
import sys, torch
from safetensors.torch import load_file, save_file
folder = sys.argv[1]
tensors = load_file(folder + "/model.safetensors")
assert torch.equal(tensors["brain"],
                   torch.tensor([1, -2, 0.25], dtype=torch.bfloat16))
assert torch.equal(tensors["weight"], torch.tensor([[1.5], [-2.0], [0.25]]))
assert torch.equal(tensors["step"], torch.tensor(1 << 40))
save_file(tensors, folder + "/back.safetensors", {"format": "pt"})
)");
  ASSERT_TRUE(run_python(python, folder / "check.py", folder.path()));
  const CheckpointReader ours = CheckpointReader::open(folder.path());
  const CheckpointReader back = CheckpointReader::open(folder / "back");
  for (const std::string& name : ours.names()) {
    const SafetensorsEntry& a = ours.find(name);
    const SafetensorsEntry& b = back.find(name);
    EXPECT_EQ(a.dtype, b.dtype);
    EXPECT_EQ(a.shape, b.shape);
    const std::size_t bytes = a.end - a.begin;
    EXPECT_EQ(std::string(static_cast<const char*>(ours.data(name)), bytes),
              std::string(static_cast<const char*>(back.data(name)), bytes));
  }
}

}  // namespace
}  // namespace shardbook
