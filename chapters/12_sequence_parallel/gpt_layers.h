#pragma once

// The layers of a GPT whose tokens are cut over a group: every rank has all
// weights and s/c tokens of each sample.
//
//   token ids [n, s] --cut--> embedding, blocks, head [n, s/c, ..] --> own loss
//                             |  attention: ring, RSA or Ulysses
//
// Ids, positions (rotary angles, too), targets and dropout are cut alike, by the
// positions of the rank's tokens. The targets were shifted before: the target of token i is token
// i + 1 of the whole sequence, which may lie on another rank.

#include <cstdint>
#include <string>

#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "chapters/common/models/models.h"
#include "comm/process_group.h"

namespace shardbook::sequence_parallel {

enum class Kind { kRing, kRsa, kUlysses };
/// "ring", "rsa", "ulysses"; throws Error for other names.
Kind kind_of(const std::string& name);

struct SequenceOptions {
  Kind kind = Kind::kRing;
  /// Ring attention only; the others know contiguous slices.
  Layout layout = Layout::kContiguous;
  /// RSA: sum dK and dV by all-reduce, as the original does.
  bool all_reduce = false;
};

/// Throws Error, with the sizes that would work, where a group of c ranks cannot
/// share sequences of s tokens and `heads` heads.
void check_sizes(const SequenceOptions& setup, int c, std::int64_t s,
                 std::int64_t heads);

/// [b, n, (g + 2) w] -> q [b, n, g w], k, v [b, n, w], each in an array of its
/// own: g = `queries_per_key` heads of queries share one of keys.
Tensors split_qkv(const Tensor& qkv, std::int64_t queries_per_key = 1);

/// Token ids or targets [n, s] -> the [n, s/c] of a rank.
Tensor cut_ids(const Tensor& ids, Layout layout, int rank, int c);

/// The same layers with attention that keeps only its input, and runs forward
/// again before its backward.
LayerFactory recomputing_attention(LayerFactory layers);

/// Dropout of x [n, s/c, h] with one device's mask of [n, s, h].
AnyModule cut_dropout(double p, Layout layout, int rank, int c);

/// The layers of one rank, for sequences of s tokens. Single-device layers
/// where c = 1.
LayerFactory sequence_layers(const SequenceOptions& setup, std::int64_t s,
                             ProcessGroup& cp);

}  // namespace shardbook::sequence_parallel
