#pragma once

// A decoder as a list of parts (block.h), to count: any config.json of the
// families of counted_families.cpp, of which the book trains seven.
//
//   const CountedModel model = CountedModel::read("config.json");
//   model.parameters();  // tied tables once
//   model.parts()["attention"];
//   return model.operations(2048, Mask::kCounted);  // of a token's forward
//
// The parts are those of transformers 5.24's classes, and so are the meanings of
// absent keys.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "chapters/common/models/block.h"
#include "chapters/common/models/models.h"

namespace shardbook {

/// Pairs of tokens that a mask hides: counted as operations or not.
enum class Mask { kCounted, kIgnored };

/// A part of a model, and how many there are.
struct CountedPart {
  /// "embedding", "attention", "mlp", "experts", "shared_experts", "router",
  /// "norm" or "head".
  std::string group;
  BlockPart part;
  double times = 1;
  /// The weights are those of the token table.
  bool is_tied = false;
  /// Of latent attention: elements per token that keys and values come from.
  std::int64_t latent = 0;
  /// Of attention: keeps all keys and values, as an indexer selects those that a
  /// token sees, as many as the window; or none, as it has those of an earlier
  /// layer.
  bool keeps_all = false, keeps_nothing = false;
  /// No gradient passes.
  bool is_detached = false;
};

struct CountedModel {
  std::string type;  ///< model_type
  std::int64_t positions = 0;
  std::vector<CountedPart> rows;
  /// Sentences on what the file has and the count has not.
  std::vector<std::string> remarks;
  /// Where the book trains this model.
  std::optional<ModelConfig> trained;
  /// Else, with latent attention, shared experts, or dense blocks among those with
  /// experts: the rows of the block's table that come nearest, to be planned.
  std::optional<ModelConfig> nearest;

  /// A preset of ModelConfig::read, a file, or a config's text. Throws Error that
  /// names the file, the key and what is allowed.
  static CountedModel read(const std::string& name_or_file);
  /// `label` names the text in messages.
  static CountedModel from_json(const std::string& text,
                                const std::string& label);
  /// The count of a GPT-2 or of the Llama family's rows. Throws Error for others.
  static CountedModel of(const ModelConfig& config);

  double parameters() const;
  /// By group; groups without parameters are absent.
  std::map<std::string, double> parts() const;
  /// That act on a token: all but the experts that it does not visit.
  double active() const;
  /// Of these, without the tables of tokens and positions and the output layer.
  double active_in_blocks() const;
  /// Operations per token of a forward on samples of `seq` tokens. With the mask
  /// ignored, a token sees all tokens, whatever the window.
  double operations(double seq, Mask mask) const;
  /// Of its backward: twice as many, without those that no gradient passes.
  double backward_operations(double seq, Mask mask) const;
  /// Bytes of the keys and values of the first `seq` tokens, where windows drop
  /// what no later token sees. `latent`: latent attention keeps what its keys
  /// and values come from.
  double kv_bytes(double seq, double element, bool latent) const;
  bool has_latent() const;
  /// Operations per token of forward and backward, as others count them. 6 N + 12
  /// L H Q T: Chowdhery et al. 2022, "PaLM", appendix B, with the N that act.
  double palm_operations(double seq) const;
  /// torchtitan's models/utils.py (01c01c88): 6 N, without tables that are only
  /// read, and attention without a causal mask, at most over its window.
  double torchtitan_operations(double seq) const;
};

}  // namespace shardbook
