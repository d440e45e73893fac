#pragma once

// DeepSpeed's example: a small convolutional net on CIFAR-10, and the data.
//
// Images come in a binary form: records of 3073 bytes, a label 0 to 9 and 32 x 32
// pixels, all red ones, all green ones, all blue ones, row by row.
//
//   CifarImages images = read_cifar10("cifar-10-batches-bin");
//   Batch batch = cifar_batch(images, {first, stride}, rows);
//
// The net has layers of linear experts in the place of its third linear layer:
//
//   conv 3 -> 6, pool, conv 6 -> 16, pool, 400 -> 120 -> 84, MoE .. MoE, 84 -> 10
//
// Each image is one token of width 84. As in the example, the residual MLP `fc3`
// is made once: with `share_mlp` all layers have the same one. Experts begin as
// copies of one. With num_experts [2, 4] the layers have 50824 parameters, or
// 57964 when each has an MLP of its own. Without layers of experts, the last
// layer is called fc3, and fc4 with them.
//
// DeepSpeedExamples, training/cifar; Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images".

#include <cstdint>
#include <string>
#include <vector>

#include "chapters/13_moe/moe_layer.h"
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

// --- The net -----------------------------------------------------------------------

struct ConvNetOptions {
  /// One MoE layer for each; empty: none.
  std::vector<int> num_experts = {2, 4};
  MoeOptions moe = {};  ///< gate, residual, aux_coefficient, ...
  bool share_mlp = true;
  std::uint64_t seed = 0;
  DType dtype = DType::kF32;
};

class ConvNet : public ModuleOf<ConvNet> {
 public:
  /// `record` may be null.
  explicit ConvNet(const ConvNetOptions& options, const MoeGroups& groups = {},
                   std::shared_ptr<MoeRecord> record = nullptr);
  /// [n, 32, 32, 3] -> [n, 10].
  Tensor forward(const Tensor& images) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "ConvNet"; }
  /// "fc4", or "fc3" without experts.
  std::string last_name() const { return moe_layers.empty() ? "fc3" : "fc4"; }

  Tensor conv1_weight, conv1_bias, conv2_weight, conv2_bias;
  Linear fc1, fc2, last;
  std::vector<MoeLayer> moe_layers;
};

}  // namespace shardbook::moe
