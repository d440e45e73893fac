#include "chapters/planner/step_parts.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <tuple>
#include <vector>

#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/planner/on_shapes.h"
#include "comm/device_mesh.h"
#include "core/context.h"
#include "sim/virtual_clock.h"

namespace shardbook::planner {
namespace {

/// Of each micro-batch the forward and the two halves of the backward, by
/// operations; then the update. In each the fullest moment comes at the same place
/// however many blocks there are.
constexpr int kMostMicroBatches = 2, kPartsOfEach = 3;
constexpr int kUpdate = kMostMicroBatches * kPartsOfEach;
using Peaks = std::array<BytesByKind, kUpdate + 1>;

double total(const BytesByKind& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), 0.0);
}

/// A step of one or two micro-batches.
struct ShortRun {
  double seconds = 0;
  /// Of the first forward, and of a micro-batch.
  double forward_s = 0, each_s = 0;
  double host_s =
      0;  ///< in which the host issues work, and does not wait to read
  Peaks peaks{};
};

/// Watches two steps: counts the operations of the first, and takes the peaks of
/// the parts of the second. The host reads a loss between a forward and its
/// backward, and at the end of the step the sum of losses.
class WatchParts : public Observer {
 public:
  explicit WatchParts(int micro_batches) : micro_batches_(micro_batches) {}
  void on_op_begin(const OpEvent&) override {
    ++now_;
    const double host_s = sim::VirtualClock::current()->main().host();
    if (!has_read_) host_s_ += host_s - last_host_s_;
    last_host_s_ = host_s;
    has_read_ = false;
    const int part = part_now();
    if (part != part_) end_part();
    part_ = part;
  }
  void on_host_read(const Device&) override {
    reads_.push_back({now_, sim::VirtualClock::current()->now_s()});
    has_read_ = true;
  }

  void begin_second() {
    forward_ = reads_[0].operation;
    // From one loss to the next; of a single micro-batch, to the sum of losses
    each_ = reads_[1].operation - (micro_batches_ > 1 ? forward_ : 0);
    reads_.clear();
    now_ = 0;
    host_s_ = last_host_s_ = 0;
    reset();
  }
  ShortRun end(double seconds) {
    end_part();
    return {seconds, reads_[0].s, reads_[1].s - reads_[0].s, host_s_, peaks_};
  }

 private:
  struct Read {
    int operation = 0;
    double s = 0;
  };

  int part_now() const {
    if (each_ == 0) return kUpdate;
    const int micro_batch = (now_ - 1) / each_, place = (now_ - 1) % each_;
    if (micro_batch >= micro_batches_) return kUpdate;
    const int half = forward_ + (each_ - forward_) / 2;
    return micro_batch * kPartsOfEach + (place < forward_ ? 0
                                         : place < half   ? 1
                                                          : 2);
  }
  void end_part() {
    const auto at_peak = RankContext::current().device.memory().at_peak_by_kind;
    BytesByKind most;
    std::copy(at_peak.begin(), at_peak.end(), most.begin());
    BytesByKind& so_far = peaks_[static_cast<std::size_t>(part_)];
    if (total(most) > total(so_far)) so_far = most;
    reset();
  }
  static void reset() { RankContext::current().device.reset_peak_memory(); }

  int micro_batches_, now_ = 0, forward_ = 0, each_ = 0, part_ = kUpdate;
  double host_s_ = 0, last_host_s_ = 0;
  bool has_read_ = false;
  std::vector<Read> reads_;
  Peaks peaks_{};
};

std::int64_t few_micro_batches(const HybridJob& job) {
  return std::min<std::int64_t>(kMostMicroBatches, job.micro_batches);
}

/// The hybrid chapter's options for few micro-batches.
hybrid::HybridOptions setup_of(const HybridJob& job) {
  hybrid::HybridOptions setup = layer_setup(job.sizes, job.layout);
  setup.dp = job.dp;
  setup.zero_stage = job.zero_stage;
  setup.micro_batches = few_micro_batches(job);
  setup.bucket_bytes = static_cast<std::int64_t>(job.bucket_bytes);
  return setup;
}

Options options_of(const HybridJob& job, std::int64_t blocks) {
  Options options = shape_options();
  options.chapter = "14_hybrid_3d";
  options.planned =
      std::make_shared<const ModelConfig>(decoder_of(job.sizes, blocks));
  options.dtype = job.layout.dtype;
  options.seq = job.sizes.seq;
  options.dropout = job.layout.dropout;
  options.world_size = job.ranks();
  options.batch = job.dp * few_micro_batches(job) * job.layout.micro_batch;
  options.cluster = job.cluster.name;
  return options;
}

ShortRun run_rank(const Options& options, const hybrid::HybridOptions& setup,
                  DeviceMesh& mesh) {
  hybrid::HybridZeroStrategy strategy(options, setup, mesh);
  const auto watch =
      std::make_shared<WatchParts>(static_cast<int>(setup.micro_batches));
  RankContext::current().add_observer(watch);
  strategy.step(0);  // records the order of its gathers
  watch->begin_second();
  sim::VirtualClock& clock = *sim::VirtualClock::current();
  clock.begin_steps();
  strategy.step(1);
  RankContext::current().remove_observer(watch);
  return watch->end(clock.now_s());
}

/// Of a model of `few` blocks, and of one of `more`.
using ShortRuns = std::vector<ShortRun>;

ShortRuns run_short(const HybridJob& job, std::int64_t few, std::int64_t more) {
  hybrid::HybridOptions setup = setup_of(job);
  std::vector<Options> models = {options_of(job, few)};
  if (more > few) models.push_back(options_of(job, more));
  for (const Options& each : models) hybrid::check_legal(each, setup);
  // Each rank has another part of the same parameters: they take as long
  const Topology topology = hybrid::topology_of(setup);
  const FoldClass ranks = ranks_that_run(job.cluster, topology).front();
  ShortRuns runs;
  on_shapes(job.cluster, job.ranks(), ranks, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, topology);
    for (const Options& each : models) {
      const ShortRun mine = run_rank(each, setup, mesh);
      if (world.is_first()) runs.push_back(mine);
    }
  });
  return runs;
}

const ShortRuns& known_short(const HybridJob& job, std::int64_t few,
                             std::int64_t more) {
  const auto key =
      std::make_tuple(job.cluster.name, job.cluster.device.sustained,
                      job.sizes.key(), job.layout.key(), job.dp, job.zero_stage,
                      job.bucket_bytes, few_micro_batches(job), few, more);
  return once_for(key, [&] { return run_short(job, few, more); });
}

}  // namespace

ZeroRun zero_run(const HybridJob& job) {
  // Stage 3 gathers ahead: the ends of a model of three blocks would meet. Stage 2
  // has whole buckets, which further blocks fill, and hides a part of them: few
  // blocks fill one
  std::int64_t few = job.zero_stage == 3 ? 4 : 3, further = 1;
  if (job.zero_stage == 2) {
    const double block = block_elements(job, runs_of(job)[0]) * job.element();
    further = std::llround(job.bucket_bytes / block);
    few += further;
    further = std::max<std::int64_t>(4, further);
  }
  few = std::min(few, job.layers);
  const std::int64_t more = std::min(few + further, job.layers);
  const ShortRuns* runs = &known_short(job, few, more);
  // Where the host takes longer over a block than the step does, work of few
  // blocks has hidden it, and would not hide that of all
  if (runs->back().host_s - runs->front().host_s >
      runs->back().seconds - runs->front().seconds) {
    runs = &known_short(job, job.layers, job.layers);
  }
  const double times = runs->size() > 1
                           ? static_cast<double>(job.layers - few) /
                                 static_cast<double>(more - few)
                           : 0;
  const ShortRun &fewer = runs->front(), &longer = runs->back();
  const auto at_layers = [=](double of_few, double of_more) {
    return of_few + times * (of_more - of_few);
  };
  ZeroRun run;
  run.forward_s = at_layers(fewer.forward_s, longer.forward_s);
  run.each_s = at_layers(fewer.each_s, longer.each_s);
  run.step_s = at_layers(fewer.seconds, longer.seconds) +
               static_cast<double>(job.micro_batches - few_micro_batches(job)) *
                   run.each_s;
  for (std::size_t part = 0; part < fewer.peaks.size(); ++part) {
    BytesByKind peak;
    for (std::size_t kind = 0; kind < peak.size(); ++kind) {
      peak[kind] = at_layers(fewer.peaks[part][kind], longer.peaks[part][kind]);
    }
    if (total(peak) > total(run.peak)) run.peak = peak;
  }
  return run;
}

}  // namespace shardbook::planner
