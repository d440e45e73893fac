#pragma once

// The experts of one rank: MLPs of equal shape, side by side.
//
//   rows [El, R, M] x c_fc [El, M, F] -> GELU -> x c_proj [El, F, M] -> [El, R, M]
//
// With no hidden units, an expert is one linear layer, [El, M, M].
//
// All experts are one product with a batch of El, not El products: a loop would
// start El small kernels. Of a parameter [E, ..] a rank holds its El experts, and
// where tensor parallelism cuts experts, 1/t of each one's hidden units.

#include "comm/process_group.h"
#include "core/layers.h"

namespace shardbook::moe {

struct ExpertsShape {
  std::int64_t experts = 8;       ///< of the layer, on all ranks
  std::int64_t width = 64;        ///< M
  std::int64_t hidden = 256;      ///< F
  double stddev = 0.02;           ///< of c_fc
  double residual_stddev = 0.02;  ///< of c_proj
  /// DeepSpeed's experts begin as copies of one; these begin independently,
  /// unless this is set.
  bool are_copies = false;
  GeluForm gelu = GeluForm::kTanh;
};

class Experts : public ModuleOf<Experts> {
 public:
  /// Experts of rank `ep_rank` of `ep`; hidden units cut over `tp`, or null.
  /// Throws Error unless ep divides the experts.
  Experts(const std::string& name, const ExpertsShape& shape, InitOptions init,
          int ep_rank, int ep, ProcessGroup* tp);
  /// [El, R, M] -> [El, R, M], the same rows on every rank of `tp`.
  Tensor forward(const Tensor& rows) override;
  void members(MemberVisitor& visit) override;
  std::string type_name() const override { return "Experts"; }

  Tensor c_fc_weight;    ///< [El, M, F / t]
  Tensor c_fc_bias;      ///< [El, F / t]
  Tensor c_proj_weight;  ///< [El, F / t, M], undefined for linear experts
  Tensor c_proj_bias;    ///< [El, M]

 private:
  ProcessGroup* tp_;
  GeluForm gelu_;
};

}  // namespace shardbook::moe
