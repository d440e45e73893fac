// Files of token ids, as other programs write them.

#include "chapters/common/models/token_files.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/data.h"
#include "chapters/common/run/options.h"
#include "tests/chapters/common/common_support.h"

namespace shardbook::common_test {
namespace {

using Ids = std::vector<std::int32_t>;

std::string little_endian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) {
    text += static_cast<char>(value >> (8 * i));
  }
  return text;
}

std::string ids_of(const std::vector<std::uint64_t>& ids, int bytes) {
  std::string text;
  for (const std::uint64_t id : ids) text += little_endian(id, bytes);
  return text;
}

/// A file of llm.c's: 256 32-bit integers, then the ids.
std::string llmc(std::uint64_t magic, std::uint64_t version,
                 std::uint64_t count, const std::string& ids) {
  return ids_of({magic, version, count}, 4) + std::string(1012, '\0') + ids;
}

/// A Megatron-LM index of two documents: sequences of 1 and 2 ids, and of 1.
std::string index_of(std::uint64_t code, std::uint64_t width) {
  return std::string("MMIDIDX\0\0", 9) + little_endian(1, 8) +
         little_endian(code, 1) + ids_of({3, 3}, 8) + ids_of({1, 2, 1}, 4) +
         ids_of({0, width, 3 * width}, 8) + ids_of({0, 2, 3}, 8);
}

/// A .npy of NumPy's format `version`.
std::string npy(const std::string& type, const std::string& shape,
                const std::string& values, const std::string& order = "False",
                int version = 1) {
  const std::string header = "{'descr': '" + type +
                             "', 'fortran_order': " + order +
                             ", 'shape': " + shape + ", }  \n";
  return "\x93NUMPY" + little_endian(static_cast<std::uint64_t>(version), 2) +
         little_endian(header.size(), version == 1 ? 2 : 4) + header + values;
}

class TokenFiles : public CommonFiles {
 protected:
  void expect_refused(const std::string& file,
                      const std::vector<std::string>& parts,
                      const std::string& format = "auto") const {
    SCOPED_TRACE(file);
    expect_error([&] { Dataset::open(file, 1, 50257, 0, format); }, parts);
  }
};

TEST_F(TokenFiles, OfLlmcHaveAHeader) {
  const std::string gpt2 =
      write("train.bin", llmc(20240520, 1, 3, ids_of({7, 50256, 0}, 2)));
  EXPECT_EQ(read_tokens(gpt2, "auto"), (Ids{7, 50256, 0}));
  EXPECT_EQ(describe_tokens(gpt2, "auto"), "3 token ids (u16, llm.c)");
  const std::string llama =
      write("any.name", llmc(20240801, 7, 2, ids_of({128000, 9}, 4)));
  EXPECT_EQ(read_tokens(llama, "auto"), (Ids{128000, 9}));
  EXPECT_EQ(describe_tokens(llama, "auto"), "2 token ids (u32, llm.c)");

  const std::string ids = ids_of({1, 2, 3}, 2);
  expect_refused(write("v.bin", llmc(20240520, 2, 3, ids)),
                 {"v.bin", "version 2", "give version 1"});
  expect_refused(write("n.bin", llmc(20240520, 1, 4, ids)),
                 {"n.bin", "4 ids of 16 bits", "6 bytes follow"});
  expect_refused(write("h.bin", llmc(20240520, 1, 3, "").substr(0, 700)),
                 {"h.bin", "1024 bytes", "it has 700"});
  expect_refused(write("q.bin", llmc(20240522, 1, 3, ids)),
                 {"q.bin", "questions"});
  expect_refused(gpt2, {"train.bin", "leave out --data-format u16"}, "u16");
}

TEST_F(TokenFiles, OfMegatronHaveAnIndexBesideThem) {
  for (const auto& [code, width] :
       std::vector<std::pair<int, int>>{{8, 2}, {4, 4}, {5, 8}, {1, 1}}) {
    const auto bytes = static_cast<std::uint64_t>(width);
    write("text.idx", index_of(static_cast<std::uint64_t>(code), bytes));
    const std::string file = write("text.bin", ids_of({5, 6, 0, 99}, width));
    EXPECT_EQ(read_tokens(file, "auto"), (Ids{5, 6, 0, 99})) << code;
    EXPECT_EQ(
        describe_tokens(file, "auto"),
        std::string("4 token ids (") + (code == 4 || code == 5 ? "i" : "u") +
            std::to_string(8 * width) + ", Megatron-LM, 2 documents joined)");
  }
  const std::string file = write("text.bin", ids_of({5, 6, 7, 8}, 2));
  const std::string good = index_of(8, 2);
  write("text.idx", good);
  expect_refused(path("text.idx"), {"text.idx", "give the .bin"});
  expect_refused(path("text"), {"No such file", "give", "text.bin"});
  expect_refused(write("text.bin", ids_of({5, 6, 7}, 2)),
                 {"text.idx", "take 8 bytes", "text.bin has 6"});
  write("text.bin", ids_of({5, 6, 7, 8}, 2));
  const auto expect_bad = [&](std::size_t at, const std::string& bytes,
                              const std::vector<std::string>& parts) {
    std::string bad = good;
    bad.replace(at, bytes.size(), bytes);
    write("text.idx", bad);
    expect_refused(file, parts);
  };
  expect_bad(9, "\2", {"text.idx", "version 2"});
  expect_bad(17, "\7", {"text.idx", "code 7", "integers"});
  expect_bad(18, "\xff\xff\xff\xff\xff\xff\xff\xff", {"its header has"});
  expect_bad(18, "\2", {"2 sequences and 3 ends of documents"});
  expect_bad(26, "\4", {"3 sequences and 4 ends of documents"});
  expect_bad(34, "\xff\xff\xff\xff", {"sequence 0 has -1 ids"});
  expect_bad(54, "\4", {"sequence 1 has 2 ids from byte 4", "byte 2"});
  for (std::size_t size = 9; size < good.size(); ++size) {
    write("text.idx", good.substr(0, size));
    EXPECT_NE(error_of([&] { read_tokens(file, "auto"); }), "") << size;
  }
  // An index of another program says nothing
  write("text.idx", "an index");
  expect_refused(file, {"text.bin", "byte 1 is 0", "--data-format u16"});
}

TEST_F(TokenFiles, WithoutAHeaderAreReadAsTold) {
  const std::string file = write("train.bin", ids_of({13, 2, 198, 0}, 2));
  EXPECT_EQ(read_tokens(file, "u16"), (Ids{13, 2, 198, 0}));
  EXPECT_EQ(read_tokens(file, "u32"), (Ids{13 | 2 << 16, 198}));
  EXPECT_EQ(read_tokens(file, "bytes").size(), 8u);
  EXPECT_EQ(describe_tokens(file, "u16"), "4 token ids (u16)");
  EXPECT_EQ(describe_tokens(file, "bytes"), "");
  expect_refused(file, {"train.bin", "byte 1 is 0", "nanoGPT", "u16"});
  // Without a zero byte such ids are hardly text
  expect_refused(write("x.bin", ids_of({0xc481, 0xc482}, 2)),
                 {"byte 0 is not UTF-8", "--data-format u16"});
  EXPECT_EQ(read_tokens(write("IDS.U32", ids_of({1, 70000}, 4)), "auto"),
            (Ids{1, 70000}));
  expect_refused(write("odd.u32", "abcdef"), {"6 bytes", "32-bit"});
  for (const char* data : {"book", "random", "walk"}) {
    expect_refused(data, {"--data-format u16", data, "is no file"}, "u16");
  }
}

TEST_F(TokenFiles, OfNumPyMayHaveAnyIntegers) {
  const auto read = [&](const std::string& bytes) {
    return read_tokens(write("IDS.NPY", bytes), "auto");
  };
  for (const int version : {1, 2, 3}) {
    EXPECT_EQ(read(npy("<u2", "(2,)", ids_of({7, 50256}, 2), "False", version)),
              (Ids{7, 50256}));
  }
  EXPECT_EQ(read(npy("<u8", "(2,)", ids_of({7, 50256}, 8))), (Ids{7, 50256}));
  EXPECT_EQ(read(npy("|i1", "(2,)", "\1\2")), (Ids{1, 2}));
  EXPECT_EQ(read(npy(">u2", "(2,)", {"\0\7\xc4\x50", 4})), (Ids{7, 50256}));
  // Rows follow each other, whichever index runs fastest in the file
  EXPECT_EQ(read(npy("|u1", "(2, 3)", "\1\2\3\4\5\6")),
            (Ids{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(read(npy("|u1", "(2, 3)", "\1\4\2\5\3\6", "True")),
            (Ids{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(read(npy("|u1", "(2, 1, 3)", "\1\4\2\5\3\6", "True")),
            (Ids{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(describe_tokens(path("IDS.NPY"), "auto"),
            "6 token ids (u8, NumPy, rows of [2, 1, 3] joined)");

  const auto refused = [&](const std::string& bytes,
                           const std::vector<std::string>& parts) {
    expect_refused(write("IDS.NPY", bytes), parts);
  };
  refused(npy("|b1", "(2,)", "\1\1"), {"IDS.NPY", "|b1 (bool)", "integers"});
  refused(npy("<f4", "(1,)", "abcd"), {"IDS.NPY", "<f4", "integers"});
  refused(npy("|O", "(1,)", "abcd"), {"IDS.NPY", "|O"});
  refused(npy("<u8", "(2,)", ids_of({7, ~std::uint64_t{0}}, 8)),
          {"18446744073709551615 at position 1"});
  refused(npy("<i2", "(2,)", ids_of({7, 0xfffe}, 2)), {"-2 at position 1"});
  refused(npy("<u2", "(3,)", "abcd"), {"IDS.NPY", "end early", "4 bytes"});
  refused(npy("<u2", "(1,)", "abcd"), {"takes 2 bytes", "4 follow"});
  refused(npy("<u2", "(2,)", "abcd", "False", 4), {"version is 4"});
  refused("text", {"--data ", "IDS.NPY", "not a .npy file"});
}

TEST_F(TokenFiles, OfOtherKindsAreNoText) {
  const std::string zero(1, '\0');
  for (const auto& [start, part] :
       std::vector<std::pair<std::string, std::string>>{
           {"PK\3\4", "give the .npy inside"},
           {"\x1f\x8b\x08", "gzip; unpack"},
           {"\x28\xb5\x2f\xfd", "zstd; unpack"},
           {"PAR1", "Parquet"},
           {"ARROW1", "Arrow"},
           {"\x80\2", "pickle"},
           {"\xff\xfe" + std::string("a"), "UTF-16"},
           {little_endian(4, 8) + "{}  ", "safetensors"},
           {"any", "byte 3 is 0"}}) {
    expect_refused(write("data.file", start + zero), {"data.file", part});
    // Whoever wants the bytes may have them
    EXPECT_EQ(read_tokens(path("data.file"), "bytes").size(), start.size() + 1);
  }
  for (const char* text : {"PAR1 is text", "BZh", "{\"text\": \"a\"}\n"}) {
    EXPECT_EQ(read_tokens(write("data.jsonl", text), "auto").size(),
              std::string(text).size());
    EXPECT_EQ(describe_tokens(path("data.jsonl"), "auto"), "");
  }
}

// Checkpoints compare it: a file has one fingerprint, whoever wrote the ids.
// Data sets read what their names or headers say.
TEST_F(TokenFiles, HaveTheFingerprintOfTheirIds) {
  const std::vector<std::uint64_t> ids = {1, 2, 3};
  const auto fingerprint = [&](const std::string& name,
                               const std::string& bytes) {
    return Dataset::open(write(name, bytes), 1, 256, 0).fingerprint();
  };
  const std::uint64_t expected = fingerprint("a", "\1\2\3");
  EXPECT_EQ(expected, 0xd0aa6218672cf5abu);
  EXPECT_EQ(fingerprint("a.u16", ids_of(ids, 2)), expected);
  EXPECT_EQ(fingerprint("a.bin", llmc(20240520, 1, 3, ids_of(ids, 2))),
            expected);
  EXPECT_EQ(fingerprint("a.npy", npy("<i8", "(3,)", ids_of(ids, 8))), expected);
}

TEST_F(TokenFiles, AreNamedInTheReportsLine) {
  ModelOptions options;
  options.data = write("ids", ids_of({1, 2}, 2));
  options.data_format = "u16";
  EXPECT_EQ(tokens_text(options), "2 token ids (u16)");
  options.data = "walk";
  EXPECT_EQ(tokens_text(options), "");
}

}  // namespace
}  // namespace shardbook::common_test
