#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/dtype.h"

namespace shardbook {

struct ModelConfig;

/// The model and its data: read by models/ and the strategies.
struct ModelOptions {
  std::string model = "gpt-nano";
  /// In place of what `model` names: one that the planner runs on shapes, and no
  /// command line can ask for.
  std::shared_ptr<const ModelConfig> planned = nullptr;
  DType dtype = DType::kF32;
  /// Narrowest type computed or sent (`dtype` where that is narrower); sets the
  /// tolerance. Set by chapters that offer one, not on the command line.
  DType narrowest = DType::kF64;
  double dropout = 0;
  std::string data = "book";
  std::string data_format = "auto";  ///< of a file (token_files.h)
  std::int64_t batch = 24;           ///< samples per step, over all ranks
  /// Tokens per sample; the command line sets 1 for images, which have one
  /// target each.
  std::int64_t seq = 64;
  std::int64_t image_size = 64;  ///< height and width
  std::uint64_t seed = 0;
  std::string load;
};

}  // namespace shardbook
