// Ring attention with numbers: four tokens of width 2 on two ranks, and how two
// blocks of keys merge by the logarithms of their sums.
//
//   ./shardbook toy sequence_parallel

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>
#include <string>

#include "chapters/12_sequence_parallel/ring_exchange.h"
#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "chapters/common/toy.h"
#include "core/attention_block.h"
#include "core/ops.h"

using namespace shardbook;
using namespace shardbook::sequence_parallel;

constexpr int kRanks = 2;
constexpr std::int64_t kTokens = 4;

/// Tokens 0, 1/4, 2/4, ..., which are queries, keys and values.
Tensor all_tokens() {
  return Tensor::from_values<double>({0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75},
                                     {1, kTokens, 2});
}

std::string numbers(const Tensor& x) {
  return fmt::format("{:.4f}", fmt::join(x.to_vector<double>(), " "));
}

/// Adds to `text` what each visiting block of keys gives; returns the outputs.
Tensor ring(const Tensor& x, ProcessGroup& cp, std::string& text) {
  AttentionOptions options;
  options.heads = 1;
  const std::int64_t own = x.size(1);
  const AttentionDraws draws = next_attention_draws();
  AttentionSums sums = {
      Tensor::zeros(x.shape(), x.options()),
      Tensor::full({1, 1, own}, -std::numeric_limits<double>::infinity(),
                   x.options())};
  Tensors here = {x};
  for (int step = 0; step < cp.size(); ++step) {
    const int source = source_at(cp.rank(), step, cp.size());
    Hop hop;
    if (step + 1 < cp.size()) hop = Hop(cp, here, /*first_tag=*/step, "K, V");
    text += fmt::format("  step {}, keys of rank {}", step, source);
    const auto blocks = visible_blocks(Layout::kContiguous, cp.rank(), source,
                                       cp.size(), own, /*causal=*/true);
    if (blocks.empty()) text += ": hidden, nothing to compute\n";
    for (const AttentionBlock& block : blocks) {
      const AttentionSums part =
          attention_block(x, here[0], here[0], block, options, draws);
      merge_attention(sums, block.queries.begin, part);
      text += fmt::format(
          "\n    of the block: lse {}, outputs {}\n"
          "    merged:       lse {}, outputs {}\n",
          numbers(part.logsumexp), numbers(part.out), numbers(sums.logsumexp),
          numbers(sums.out));
    }
    if (step + 1 < cp.size()) here = hop.wait();
  }
  return sums.out;
}

int main() {
  AttentionOptions options;
  options.heads = 1;
  options.causal = true;
  const Tensor x = all_tokens();
  const Tensor whole = attention(x, x, x, options);
  fmt::print("one device: outputs {}\n", numbers(whole));
  return toy::run(kRanks, [&](ProcessGroup& cp) {
    const auto own = [&](const Tensor& of_all) {
      return cut_sequence(of_all, 1, Layout::kContiguous, cp.rank(), cp.size());
    };
    std::string text = fmt::format("rank {}\n", cp.rank());
    const Tensor y = ring(own(x), cp, text);
    text += fmt::format("loss of rank {} {:.6f}\n", cp.rank(),
                        mean(mul(y, y)).item());
    const bool is_equal = max_abs_difference(y, own(whole)) < 1e-12;
    toy::print_in_order(cp, text + (is_equal ? "" : "not equal\n"));
    return is_equal;
  });
}
