#include "chapters/03_zero_fsdp/zero/zero_memory.h"

#include <algorithm>
#include <cmath>

#include "chapters/03_zero_fsdp/zero/zero12.h"
#include "chapters/03_zero_fsdp/zero/zero3_walk.h"
#include "core/check.h"

namespace shardbook::zero {

// --- The paper's table -------------------------------------------------------

StateBytes state_bytes(DType dtype, const std::string& optimizer,
                       const OptimizerOptions& how) {
  const auto element = static_cast<double>(dtype_bytes(dtype));
  const double stat = dtype == DType::kF64 ? 8 : 4;
  const double moments = optimizer != "sgd" ? 2 : (how.momentum > 0 ? 1 : 0);
  const double master = element < 4 ? 4 : 0;
  return {element, element, moments * stat + master};
}

ModelStates model_states(int stage, double parameters, int ranks,
                         const StateBytes& bytes) {
  SB_CHECK(stage >= 0 && stage <= 3, "zero: stage ", stage,
           "; give 0 (DDP) to 3");
  const double d = ranks;
  return {parameters * bytes.parameter / (stage >= 3 ? d : 1),
          parameters * bytes.gradient / (stage >= 2 ? d : 1),
          parameters * bytes.optimizer / (stage >= 1 ? d : 1)};
}

double max_parameters(int stage, double capacity_bytes, int ranks,
                      const StateBytes& bytes) {
  return capacity_bytes / model_states(stage, 1, ranks, bytes).total();
}

// --- DeepSpeed's estimators --------------------------------------------------

DeepSpeedEstimate deepspeed_estimate(int stage, const DeepSpeedSetup& setup) {
  SB_CHECK(stage == 2 || stage == 3,
           "zero: DeepSpeed estimates stages 2 and "
           "3, not ",
           stage);
  constexpr double kSlack = 1.5;  // "additional_buffer_factor"
  const double n = setup.parameters;
  const double on_node = setup.devices_per_node;
  const double all = on_node * setup.nodes;
  // Every rank builds the whole model in f32 on the host
  const double building = 4 * on_node;
  if (stage == 2) {
    if (!setup.offload_optimizer) {
      return {4 * n + std::floor(16 * n / all), n * building * kSlack};
    }
    return {2 * n, n * std::max(4 * all, 16.0) * kSlack};
  }

  const double layer = 4 * setup.largest_layer;
  if (!setup.offload_optimizer) {
    const double built = setup.zero_init ? setup.largest_layer : n;
    return {layer + std::floor(18 * n / all), built * building * kSlack};
  }
  const double kept = (setup.offload_parameters ? 18.0 : 16.0) / setup.nodes;
  const double host =
      n * (setup.zero_init ? kept : std::max(building, kept)) * kSlack;
  return {layer + (setup.offload_parameters ? 0 : std::floor(2 * n / all)),
          host};
}

// --- This program's peaks ----------------------------------------------------

namespace {

struct Sizes {
  double h, vocab, positions;
  bool is_gpt;
};

// The most gradients that exist at one time when each is dropped as it comes,
// in elements. A linear layer makes those of weight and bias together. The
// tied table's gradient from the head lives until the embedding's joins it.
double passing_gradients(const Sizes& s) {
  const double widest = 4 * s.h * s.h + 4 * s.h;  // c_fc, or fc1
  if (!s.is_gpt) return std::max({widest, (s.h + 1) * s.vocab});
  const double table = s.vocab * s.h;
  return table + std::max({widest, table, s.positions * s.h});
}

/// The most gradients that exist at one time in a backward of stage 2 in which
/// some are larger than a bucket: those stay until their reduction is done.
class LargeGradients {
 public:
  explicit LargeGradients(const ZeroStage12& zero)
      : names_(zero.trained_names(0)),
        numels_(zero.layout(0).numels),
        buckets_(zero.buckets(0)),
        overlaps_(zero.options().overlap_comm),
        has_arrived_(names_.size()) {}

  /// In elements. Gradients come in the reverse order of definition, those of
  /// one module together. With `is_tied` the head's part of the first
  /// parameter's gradient comes before all and waits for the embedding's part.
  std::int64_t peak(bool is_tied) {
    if (is_tied) level_.add(numels_[0]);
    for (std::size_t end = names_.size(); end > 0;) {
      std::size_t begin = end - 1;
      while (begin > 0 && module_of(begin - 1) == module_of(end - 1)) --begin;
      for (std::size_t i = begin; i < end; ++i) level_.add(numels_[i]);
      if (is_tied && begin == 0) level_.add(-numels_[0]);  // the two are added
      for (std::size_t i = begin; i < end; ++i) has_arrived_[i] = true;
      drain();
      end = begin;
    }
    return level_.peak();
  }

 private:
  std::string module_of(std::size_t i) const {
    return names_[i].substr(0, names_[i].rfind('.'));
  }

  void drain() {
    for (; next_ < buckets_.size(); ++next_) {
      bool is_full = true;
      for (const int parameter : buckets_[next_].parameters) {
        const auto i = static_cast<std::size_t>(parameter);
        is_full = is_full && has_arrived_[i];
        if (!has_arrived_[i] || numels_[i] == 0) continue;
        // Copied and dropped, or its own message
        if (!buckets_[next_].is_large) level_.add(-numels_[i]);
        numels_[i] = 0;
      }
      if (!is_full) return;
      level_.add(-flying_);
      flying_ = buckets_[next_].is_large ? buckets_[next_].numel : 0;
      if (overlaps_) continue;
      level_.add(-flying_);
      flying_ = 0;
    }
  }

  const std::vector<std::string> names_;
  std::vector<std::int64_t> numels_;
  const std::vector<GradientBucket> buckets_;
  const bool overlaps_;
  std::vector<bool> has_arrived_;
  std::size_t next_ = 0;
  std::int64_t flying_ = 0;
  Level level_;
};

}  // namespace

MemoryBill zero_bill(const ZeroOptimizer& zero, const Options& options,
                     const ModelConfig& config, std::int64_t rows,
                     std::int64_t micro_steps, bool recompute,
                     double sent_beside) {
  const int stage = zero.options().stage;
  const bool is_offloaded = zero.options().offload_optimizer;
  const StateBytes bytes =
      state_bytes(options.dtype, options.optimizer, options.optimizer_options);
  const auto shard = static_cast<double>(zero.shard_numel());
  MemoryBill bill = single_device_bill(options, config, rows, recompute,
                                       /*accumulates=*/stage == 1);
  const bool trains = options.steps > 0;
  const bool has_updates = options.steps > zero.num_skipped_steps();
  const bool is_resumed = options.first_step > 0;

  // f32 copies of 16-bit weights are there from the beginning, the rest from the
  // first update, or from the checkpoint where there are steps to come
  const bool has_state = has_updates || (trains && is_resumed);
  const double masters = dtype_bytes(options.dtype) == 2 ? 4 : 0;
  bill[MemoryKind::kOptimizerState] =
      is_offloaded ? 0 : shard * (has_state ? bytes.optimizer : masters);
  const Sizes sizes{static_cast<double>(config.n_embd),
                    static_cast<double>(config.vocab_size),
                    static_cast<double>(config.n_positions),
                    config.type == "gpt2"};
  // Stage 1 keeps all gradients; later stages see each of them pass
  double passing = trains ? passing_gradients(sizes) : 0;
  double in_step = 8;  // the norm
  double in_forward = 0;
  double in_publishing = 0;  // new parameters, or loaded ones
  double parameters = 0;
  if (const auto* flat = dynamic_cast<const ZeroStage12*>(&zero)) {
    parameters = shard * zero.group().size() * bytes.parameter;
    in_publishing = static_cast<double>(flat->gather_bytes());
    in_step = std::max(in_step, static_cast<double>(flat->bucket_bytes()));
    if (flat->has_large_gradients() && trains) {
      passing = static_cast<double>(LargeGradients(*flat).peak(sizes.is_gpt));
    }
  } else if (const auto* sliced = dynamic_cast<const ZeroStage3*>(&zero)) {
    // The first micro-step records, the others gather ahead and keep
    FetchWalk first(*sliced, false), later(*sliced, true);
    if (trains) first.micro_step(sizes.is_gpt);
    if (options.steps * micro_steps > 1) later.micro_step(sizes.is_gpt);
    parameters =
        (zero.options().offload_parameters ? 0 : shard * bytes.parameter) +
        static_cast<double>(
            std::max(sliced->construction_bytes(),
                     sliced->persistent_bytes() +
                         std::max(first.parameters(), later.parameters())));
    // What is gathered ahead in the forward comes before the caller's loss
    in_forward = static_cast<double>(later.forward_communication());
    in_publishing = static_cast<double>(sliced->refresh_buffer_bytes());
    in_step = std::max({in_step, static_cast<double>(first.communication()),
                        static_cast<double>(later.communication())});
  }
  if (!has_updates && !is_resumed) in_publishing = 0;
  bill[MemoryKind::kParameter] =
      std::max(parameters, static_cast<double>(zero.initial_device_bytes()));
  bill[MemoryKind::kGradient] =
      bytes.gradient * (stage == 1 ? shard * zero.group().size()
                                   : (is_offloaded ? 0 : shard) + passing);
  const double most_in_step =
      std::max(sent_beside + std::max(in_step, in_publishing), in_forward);
  bill[MemoryKind::kCommunication] = trains ? most_in_step : in_publishing;
  return bill;
}

}  // namespace shardbook::zero
