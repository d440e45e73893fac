#pragma once

// The layers of Megatron-LM: matrices cut by columns or by rows, and the
// vocabulary cut by rows.
//
//   Y = gelu(X A) B      A = [A_0 .. A_{t-1}] by columns, B by rows
//
//   rank r:  gelu(f(X) A_r) B_r, summed over the ranks by g
//
// GELU needs no communication, since each column of X A is whole on one rank.
// Shoeybi et al. 2019, "Megatron-LM", section 3. Names and initial values of
// parameters are the same as on one device.

#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/mappings.h"
#include "chapters/07_tensor_parallel/rng.h"
#include "chapters/common/models/models.h"

namespace shardbook::tensor_parallel {

/// A matrix, and columns of it that are cut one by one: queries, keys and values.
struct LinearShape {
  std::int64_t in = 0, out = 0;
  std::vector<Columns> columns = {};  ///< empty: one
  double stddev = 0.02;
  bool bias = true;
};

/// y_r = x W_r + b_r: columns of the result. All ranks have x [.., in]; its
/// gradient is summed over the ranks while W_r's is computed.
class ColumnParallelLinear : public ModuleOf<ColumnParallelLinear> {
 public:
  /// With `gather_output`, every rank gets all columns, which must be one.
  ColumnParallelLinear(const std::string& name, const LinearShape& shape,
                       InitOptions init, ProcessGroup& tp,
                       bool gather_output = false);
  /// [.., in] -> [.., out / t], or [.., out] with gather_output.
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "ColumnParallelLinear"; }

  Tensor weight;  ///< [in, out / t]
  Tensor bias;    ///< [out / t]; undefined: none

 protected:
  ProcessGroup* tp_;

 private:
  bool gather_output_;
};

/// y = sum over ranks of x_r W_r, + b. The bias is on every rank and added
/// after the sum, not t times within it.
class RowParallelLinear : public ModuleOf<RowParallelLinear> {
 public:
  /// Without `input_is_parallel`, x [.., in] is whole, and each rank uses its
  /// part.
  RowParallelLinear(const std::string& name, const LinearShape& shape,
                    InitOptions init, ProcessGroup& tp,
                    bool input_is_parallel = true);
  /// [.., in / t] -> [.., out] on every rank.
  Tensor forward(const Tensor& x) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "RowParallelLinear"; }

  Tensor weight;  ///< [in / t, out]
  Tensor bias;    ///< [out]; undefined: none

 protected:
  ProcessGroup* tp_;

 private:
  bool input_is_parallel_;
};

/// Rank r of t has rows [r V/t, (r + 1) V/t) of the table; other rows read as
/// zeros, and the ranks' vectors are summed.
class VocabParallelEmbedding : public ModuleOf<VocabParallelEmbedding> {
 public:
  VocabParallelEmbedding(const std::string& name, std::int64_t rows,
                         std::int64_t width, double stddev, InitOptions init,
                         ProcessGroup& tp);
  /// ids [n, S] -> [n, S, width] on every rank.
  Tensor forward(const Tensor& ids) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "VocabParallelEmbedding"; }
  /// The first row of this rank.
  std::int64_t first_row() const { return tp_->rank() * weight.size(0); }

  Tensor weight;  ///< [V / t, width]

 protected:
  ProcessGroup* tp_;
};

/// The mean loss over all targets [n, S], the same on every rank: three
/// all-reduces of n S values (f32, or f64 for f64). `num_classes` is the
/// vocabulary without its padding.
Tensor vocab_parallel_cross_entropy(const Tensor& logits, const Tensor& targets,
                                    std::int64_t num_classes, ProcessGroup& tp,
                                    Reduction reduction = Reduction::kMean);
/// V rounded up to a multiple of `divisible_by` t (Megatron's
/// --make-vocab-size-divisible-by, 128 there).
std::int64_t padded_vocabulary(std::int64_t vocabulary, int t,
                               std::int64_t divisible_by = 128);

/// The part of the parameter `name` that rank `rank` of t holds: columns or rows,
/// as its row of the block's table says, and rows of the vocabulary. Norms,
/// positions, gates of experts and a bias behind rows are whole; throws Error for
/// any other.
Shards layout(const ModelConfig& config, const std::string& name, int rank,
              int t);
/// Whether a rank has rows of this Linear, or else columns. Throws Error, which
/// names it, for a part that is cut in neither way.
bool takes_rows(const std::string& name, const BlockPart& part);
LinearShape shape_of(const BlockPart& part);

/// Throws Error, which begins with `what` and names sizes that work, unless t
/// ranks can share the heads and hidden units.
void check_ranks(const ModelConfig& config, int t, const std::string& what);

/// The layers of one rank for a GPT. `num_classes` is the vocabulary without
/// its padding. Dropout draws one device's masks; with `rng`, which outlives
/// the layers, attention draws from the rank's tensor stream, other layers from
/// its default stream. Throws Error, with the sizes that would work, if heads,
/// width or padded vocabulary do not divide by t.
LayerFactory layers(const ModelConfig& config, ProcessGroup& tp,
                    RngTracker* rng = nullptr);

}  // namespace shardbook::tensor_parallel
