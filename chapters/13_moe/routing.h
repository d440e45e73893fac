#pragma once

// Routing: which experts a token goes to, and where it waits.
//
//   tokens     t0   t1   t2   t3   t4          capacity C = 2
//   choice     e1   e0   e1   e1   e0
//   slot        0    0    1    -    1          t3 finds its queue full: dropped
//
//   expert 0   t1   t4
//   expert 1   t0   t2
//
// The index form of a routing has an expert and a slot for each choice of each
// token; a dropped choice has slot -1. Everything here is arithmetic on the host:
// print it, test it without ranks. gate.h computes the weights.
//
// Each process routes its OWN tokens: capacity and drops depend on the group of
// tokens that is routed together. Random draws are keyed by the token's place in
// the global batch, so ranks that share tokens draw the same, and so does a
// forward that is computed again.
//
// Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2; Lepikhin
// et al. 2020, "GShard", section 2.2; Fedus et al. 2021, "Switch Transformers",
// section 2; DeepSpeed, deepspeed/moe/sharded_moe.py.

#include <cstdint>
#include <string>
#include <vector>

#include "core/context.h"

namespace shardbook::moe {

/// An index of a list.
inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// In the order of noise_names.
enum class Noise {
  kNone,
  kJitter,     ///< the gate's input times uniform(0.99, 1.01)
  kRSample,    ///< top-1: Gumbel noise on the logits decides, clean gates weigh
  kNoisyTopK,  ///< logits + normal(0, 1) softplus(x Wnoise), Shazeer et al.
};
/// The values of --noise: "none", "jitter", "rsample", "noisy-top-k". noise_of
/// throws Error for other names.
std::vector<std::string> noise_names();
Noise noise_of(const std::string& name);
/// Which choices keep their place where k >= 3 choices overfill an expert.
enum class DropPolicy {
  kProbs,     ///< the most probable ones
  kPosition,  ///< the first ones
};

struct GateOptions {
  std::int64_t num_experts = 8;
  /// 1: top-1, 2: top-2 of GShard, more: top-k. Top-k of two choices would
  /// queue them differently than top-2 does.
  std::int64_t k = 1;
  double capacity_factor = 1;
  double eval_capacity_factor = 1;
  std::int64_t min_capacity = 4;
  /// False: every expert has room for all that chose it, on all ranks.
  bool drop_tokens = true;
  /// Top-1: random tokens keep their places; false: the first ones.
  bool use_rts = true;
  Noise noise = Noise::kNone;
  /// Top-2: Gumbel noise on the logits of the second choice.
  bool second_expert_sampling = true;
  DropPolicy drop_policy = DropPolicy::kProbs;
};

/// Throws Error for options that make no sense together.
void check_gate(const GateOptions& options);

/// Tokens that an expert accepts: max(min_capacity, ceil(S factor k / E)), in
/// double (DeepSpeed computes in f32: 31 where S = 25, E = 1, factor 1.2 make
/// exactly 30).
std::int64_t capacity(std::int64_t tokens, const GateOptions& options,
                      bool is_training);

/// The tokens of each sample that this rank has, where ranks share samples
/// (context parallelism).
struct SamplePart {
  std::int64_t whole = 0;  ///< tokens of the whole sample
  /// A value for each token of this rank, in order; empty: the whole sample.
  std::vector<std::int64_t> place;
};

/// Random numbers for the tokens of a gate, by their place in the global batch.
class TokenDraws {
 public:
  /// Tokens [rows, per_row] placed in the batch by `random.batch`, and in their
  /// samples by `part`. Throws Error when `part` has another number of tokens.
  TokenDraws(const std::string& gate, const RandomState& random,
             std::int64_t per_row, SamplePart part = {});
  /// In (0, 1): draw `index` of `purpose` for a token.
  double uniform(const char* purpose, std::int64_t token,
                 std::int64_t index = 0) const;
  /// -log(-log(u)): the largest of logits plus such noise is a sample of their
  /// softmax.
  double gumbel(const char* purpose, std::int64_t token,
                std::int64_t index) const;
  /// The stream of `purpose` in this step, for fills of whole tensors.
  std::uint64_t stream(const char* purpose) const;
  std::uint64_t seed() const { return random_.seed; }

 private:
  std::string gate_;
  RandomState random_;
  std::int64_t per_row_;
  SamplePart part_;
};

/// The expert and the slot of each choice.
struct Routing {
  std::int64_t tokens = 0, k = 0, experts = 0;
  std::int64_t capacity = 0;
  /// [S k], by token, then by choice; -1: the token is not routed.
  std::vector<std::int64_t> expert;
  /// [S k], place in the expert's queue; -1: dropped, or not routed.
  std::vector<std::int64_t> slot;

  bool is_kept(std::int64_t token, std::int64_t choice) const {
    return slot[static_cast<std::size_t>(token * k + choice)] >= 0;
  }
  /// Choices of each expert, before dropping.
  std::vector<std::int64_t> exp_counts() const;
  std::int64_t num_kept() const;
  std::int64_t num_dropped() const;
};

/// The inputs of a routing: gates and logits [S, E], row by row.
struct GateValues {
  std::vector<double> gates, logits;
};

/// The experts of each token, no slots yet. `used_token` (or none) is false for
/// padding, which is not routed. Ties go to the lowest expert.
Routing choose_experts(const GateValues& values, std::int64_t tokens,
                       const GateOptions& options, const TokenDraws& draws,
                       bool is_training,
                       const std::vector<bool>& used_token = {});
/// The choices of a run on shapes, which has no gates: each token draws k
/// different experts, all equally likely.
Routing draw_experts(std::int64_t tokens, const GateOptions& options,
                     const TokenDraws& draws);
/// Gives slots to as many choices as fit.
void take_slots(Routing& routing, std::int64_t capacity,
                const std::vector<double>& gates, const GateOptions& options,
                const TokenDraws& draws, bool is_training);

/// Choices sorted by expert, stable in the order of tokens: without capacity, all
/// of an expert's tokens lie together.
struct SortedChoices {
  std::vector<std::int64_t> choice;  ///< [n] numbers s k + j, by expert
  std::vector<std::int64_t> counts;  ///< [E]
};
SortedChoices sort_by_expert(const Routing& routing);

}  // namespace shardbook::moe
