// The bill of a GPT or an MLP on dp x tp ranks: the formulas of the page.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "chapters/11_dtensor/dtensor_strategy.h"
#include "chapters/common/run/kept.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::dtensor {

namespace {

// `count` parameters that have `rows` rows of `width` elements under tp.
struct Matrices {
  double rows, width, count;
};

std::vector<Matrices> parameters_of(const DTensorLayout& layout, int rank) {
  std::vector<Matrices> all;
  for (const ParameterKind& kind : parameter_kinds(layout.config)) {
    const Shape shape = layout.on_tp(kind.name, rank);
    const auto rows = static_cast<double>(shape[0]);
    all.push_back(
        {rows, static_cast<double>(shape_numel(shape)) / rows, kind.count});
  }
  return all;
}

// A table that is also the output layer is used twice.
bool uses_table_twice(const ModelConfig& config) {
  return config.has_blocks() && decoder_names(config).head.empty();
}

// `count` parameters of so many elements, whose gradients tp sums.
struct Summed {
  double elements, count;
};

// Norms over heads; and where tp cuts tokens, all that meets a token outside of
// the products: norms, and biases behind rows.
std::vector<Summed> summed_over_tp(const ModelConfig& config,
                                   bool sequence_parallel) {
  std::vector<Summed> all;
  if (config.type == "mlp") return all;
  const BlockTable block = block_table(config);
  const auto layers = static_cast<double>(config.n_layer);
  for (const BlockPart& norm : block.head_norms) {
    all.push_back({norm.parameters(), layers});
  }
  if (!sequence_parallel) return all;
  const auto h = static_cast<double>(config.n_embd);
  all.push_back({h, (2 * layers + 1) * (block.norm_1.bias ? 2 : 1)});
  for (const BlockPart& part : {block.proj, block.down}) {
    if (part.bias) all.push_back({h, layers});
  }
  return all;
}

// Elements of all parameters, counting `rows(n)` of n rows.
double elements(const std::vector<Matrices>& parameters,
                const std::function<double(double n)>& rows) {
  double sum = 0;
  for (const Matrices& each : parameters) {
    sum += rows(each.rows) * each.width * each.count;
  }
  return sum;
}

}  // namespace

double DTensorStrategy::predicted_bytes() const {
  const ShardedSizes s = sizes();
  // tp: two all-reduces per pair of layers, or a gather and a scatter for each;
  // tables that tp cuts are a third pair. The loss has three numbers per token,
  // and only the gradient of positions is gathered.
  const double pairs =
      is_mlp() ? 1 : 2 * s.layers + (setup_.sequence_parallel ? 1 : 0);
  const double tokens = s.tokens / d_;
  double summed = 2 * pairs * tokens * s.h * s.element;
  for (const Summed& each :
       summed_over_tp(config(), setup_.sequence_parallel)) {
    summed += each.count * each.elements * s.element;
  }
  if (setup_.sequence_parallel) {
    summed += 3 * tokens * s.stat;
    if (s.positions > 0) summed += s.seq * s.h * s.element / 2;
  }
  const double tp = 2 * (t_ - 1) / t_ * summed;
  // dp: every use of a parameter; a GPT uses wte twice. R: an all-reduce; S(0):
  // an all-gather and a reduce-scatter of parts of ceil(n / d) rows.
  const auto travels = [this](double n) {
    return setup_.data_parallel == "fsdp" ? d_ * std::ceil(n / d_) : n;
  };
  const double second_use =
      uses_table_twice(config()) ? travels(vocabulary_here()) * s.h : 0;
  const double dp =
      2 * (d_ - 1) / d_ * s.element *
      (elements(parameters_of(layout_, devices_.world().rank()), travels) +
       second_use);
  // The sum of losses, and the count of targets
  const double loss = 2 * 2 * (d_ - 1) / d_ * s.stat;
  return static_cast<double>(options_.steps) *
         (s.micro_batches * (tp + dp + loss) + predicted_norm_bytes());
}

double DTensorStrategy::vocabulary_here() const {
  const std::string name = decoder_names(config()).table + ".weight";
  return static_cast<double>(layout_.on_tp(name, devices_.world().rank())[0]);
}

MemoryBill DTensorStrategy::memory() const {
  const bool is_fsdp = setup_.data_parallel == "fsdp";
  const ShardedSizes s = sizes();
  // dp's parts of n rows: the longest, this rank's, and all with their padding
  const double d = is_fsdp ? d_ : 1;
  const double index = is_fsdp ? devices_.coordinate("dp") : 0;
  const auto part = [=](double n) { return std::ceil(n / d); };
  const auto own = [=](double n) {
    return std::clamp(n - index * part(n), 0., part(n));
  };
  const auto padded = [=](double n) { return d * part(n); };
  const auto all = parameters_of(layout_, devices_.world().rank());
  const double parameters = elements(all, own);

  MemoryBill bill;
  bill.bytes.fill(0);
  bill[MemoryKind::kParameter] = parameters * s.element;
  if (options_.steps == 0) return bill;
  bill[MemoryKind::kOptimizerState] =
      optimizer_states(options_) * parameters * s.stat;
  // FSDP's gradients are padded to parts of equal lengths
  bill[MemoryKind::kGradient] = elements(all, part) * s.element;
  KeptSizes here =
      kept_sizes(options_, options_.batch /
                               (passes_.micro_batches * static_cast<int>(d_)));
  here.t = t_;
  // Matrices are cut over tp
  double& kept = bill[MemoryKind::kActivation];
  const double tokens = here.rows * here.tokens;
  if (is_mlp()) {
    kept = tokens * ((3 + 8 / t_) * s.h + s.vocabulary) * s.element +
           tokens * s.stat;
  } else {
    kept = s.layers * kept_by_block(config(), here);
    here.t = 1;
    ModelConfig own = config();
    own.vocab_size = static_cast<std::int64_t>(vocabulary_here());
    kept += kept_by_head(own, here);
  }
  // Norms see this rank's part of the tokens
  if (setup_.sequence_parallel) {
    const BlockPart& norm = s.block.norm_1;
    kept -= (tokens - tokens / t_) * (2 * s.layers + 1) *
            (norm.kept() * s.element + norm.statistics() * s.stat);
  }
  // The loss; over dp also this rank's sum and the count of all
  kept += (d_ > 1 ? 3 : 1) * s.stat;
  // FSDP keeps gathered parameters for backward: a tied table twice, but no
  // positions
  if (is_fsdp && d_ > 1) {
    double more = uses_table_twice(config()) ? padded(vocabulary_here()) : 0;
    const bool has_positions =
        !is_mlp() && !decoder_names(config()).positions.empty();
    if (has_positions) more -= padded(s.positions);
    kept += (elements(all, padded) + more * s.h) * s.element;
  }
  return bill;
}

// Nothing overlaps: each operation waits for the layout that it needs.
double DTensorStrategy::step_s() const {
  if (!textbook::is_chosen(options_) || is_mlp()) return kNotPredicted;
  const ShardedSizes s = sizes();
  textbook::GptTimes times =
      textbook::gpt_times(options_, config(), s.tokens / s.seq / d_);
  times.vocabulary = vocabulary_here();
  const double head = 3 * times.head();
  times.t = t_;
  const double per_pair =
      2 * textbook::all_reduce(t_, times.tokens * times.h * s.element);
  const double blocks = s.layers * (times.block_forward() +
                                    times.block_backward() + 2 * per_pair);
  double over_tp = 0;
  for (const Summed& each :
       summed_over_tp(config(), setup_.sequence_parallel)) {
    over_tp += each.count * textbook::all_reduce(t_, each.elements * s.element);
  }
  if (setup_.sequence_parallel) {
    over_tp += per_pair + 3 * textbook::all_reduce(t_, times.tokens * s.stat);
    if (s.positions > 0) {
      over_tp += textbook::all_gather(t_, s.seq * s.h * s.element);
    }
  }
  // One use of n rows: an all-reduce, or a gather and a scatter, equally long
  const auto used = [&](double n, double width) {
    const double rows =
        setup_.data_parallel == "fsdp" ? d_ * std::ceil(n / d_) : n;
    return textbook::all_reduce(d_, rows * width * s.element);
  };
  double uses =
      uses_table_twice(config()) ? used(times.vocabulary, times.h) : 0;
  for (const Matrices& each : parameters_of(layout_, devices_.world().rank())) {
    uses += each.count * used(each.rows, each.width);
  }
  const double loss = 2 * textbook::all_reduce(d_, s.stat);
  return s.micro_batches * (blocks + over_tp + head + uses + loss) +
         textbook::all_reduce(d_ * t_, 8);
}

}  // namespace shardbook::dtensor
