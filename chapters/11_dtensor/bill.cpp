// The bill of a GPT on dp x tp ranks: the formulas of the page.

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

std::vector<Matrices> parameters_of(const ShardedSizes& s, double t) {
  const double h = s.h, layers = s.layers;
  return {{s.vocabulary, h, 1},   {s.positions, h, 1},
          {h, 1, 2 + 6 * layers},  // norms, and biases of both c_proj
          {h, 3 * h / t, layers},  // c_attn
          {3 * h / t, 1, layers}, {h / t, h, layers},       // its c_proj
          {h, 4 * h / t, layers},                           // c_fc
          {4 * h / t, 1, layers}, {4 * h / t, h, layers}};  // its c_proj
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
  // tp: four all-reduces per layer
  const double tp = 4 * s.layers * 2 * (t_ - 1) / t_ * s.tokens / d_ * s.h;
  // dp: every use of a parameter; wte has two uses. R: an all-reduce; S(0): an
  // all-gather and a reduce-scatter of parts of ceil(n / d) rows.
  const auto travels = [this](double n) {
    return setup_.data_parallel == "fsdp" ? d_ * std::ceil(n / d_) : n;
  };
  const double dp =
      2 * (d_ - 1) / d_ *
      (elements(parameters_of(s, t_), travels) + travels(s.vocabulary) * s.h);
  // The sum of losses, and the count of targets
  const double loss = 2 * 2 * (d_ - 1) / d_ * s.stat;
  return static_cast<double>(options_.steps) *
         (s.micro_batches * ((tp + dp) * s.element + loss) +
          predicted_norm_bytes());
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
  const auto all = parameters_of(s, t_);
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
  // Matrices are cut over tp; the head and the loss are whole
  double& kept = bill[MemoryKind::kActivation];
  kept = s.layers * kept_by_block(config(), here);
  here.t = 1;
  // The loss; over dp also this rank's sum and the count of all
  kept += kept_by_head(config(), here) + (d_ > 1 ? 3 : 1) * s.stat;
  // FSDP keeps gathered parameters for backward: wte twice, but not wpe
  if (is_fsdp && d_ > 1) {
    kept += (elements(all, padded) +
             (padded(s.vocabulary) - padded(s.positions)) * s.h) *
            s.element;
  }
  return bill;
}

// Nothing overlaps: each operation waits for the layout that it needs.
double DTensorStrategy::step_s() const {
  if (!textbook::is_chosen(options_)) return kNotPredicted;
  const ShardedSizes s = sizes();
  textbook::GptTimes times =
      textbook::gpt_times(options_, config(), s.tokens / s.seq / d_);
  const double head = 3 * times.head();  // on every rank of tp
  times.t = t_;
  const double blocks =
      times.block_forward() + times.block_backward() +
      4 * textbook::all_reduce(t_, times.tokens * times.h * s.element);
  // One use of n rows: an all-reduce, or a gather and a scatter, equally long
  const auto used = [&](double n, double width) {
    const double rows =
        setup_.data_parallel == "fsdp" ? d_ * std::ceil(n / d_) : n;
    return textbook::all_reduce(d_, rows * width * s.element);
  };
  double uses = used(times.vocabulary, times.h);  // the table's second
  for (const Matrices& each : parameters_of(s, t_)) {
    uses += each.count * used(each.rows, each.width);
  }
  const double loss = 2 * textbook::all_reduce(d_, s.stat);
  return s.micro_batches * (s.layers * blocks + head + uses + loss) +
         textbook::all_reduce(d_ * t_, 8);
}

}  // namespace shardbook::dtensor
