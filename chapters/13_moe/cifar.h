#pragma once

// CIFAR-10 in its binary form: records of 3073 bytes, a label 0 to 9 and 32 x 32
// pixels, all red ones, all green ones, all blue ones, row by row.
//
//   CifarImages images = read_cifar10("cifar-10-batches-bin");
//   Batch batch = cifar_batch(images, {first, stride}, rows);
//
// Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images".

#include <cstdint>
#include <string>
#include <vector>

#include "chapters/common/models/data.h"

namespace shardbook::moe {

constexpr std::int64_t kCifarSide = 32;
constexpr std::int64_t kCifarRecord = 1 + 3 * kCifarSide * kCifarSide;

struct CifarImages {
  std::vector<std::uint8_t> bytes;  ///< records, end to end
  std::int64_t size() const {
    return static_cast<std::int64_t>(bytes.size()) / kCifarRecord;
  }
};

/// The records of a file, or of a folder's data_batch_1.bin to data_batch_5.bin.
/// Throws Error that names the file and the record for files that cannot be read,
/// that end within a record, and for labels above 9.
CifarImages read_cifar10(const std::string& path);
/// `n` records in that form: noise in a colour that the label decides, so that
/// they can be learned.
CifarImages synthetic_cifar10(std::int64_t n, std::uint64_t seed);

struct CifarData {
  CifarImages training, test;
};
/// The records of the folder cifar-10-batches-bin, test_batch.bin apart. Without
/// a folder, 1000 and 200 synthetic ones.
CifarData open_cifar10(const std::string& folder, std::uint64_t seed);

/// Images [n, 32, 32, 3] in `dtype`, values in -1 to 1, and labels i64 [n]: images
/// slice.first, slice.first + slice.stride, ..., wrapping at the end.
Batch cifar_batch(const CifarImages& images, BatchSlice slice,
                  std::int64_t rows, DType dtype = DType::kF32);

}  // namespace shardbook::moe
