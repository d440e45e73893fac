#include "chapters/common/run/worlds.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <sstream>

#include "chapters/common/run/exit_status.h"
#include "core/check.h"
#include "core/gpus.h"
#include "core/how_many.h"
#include "sim/chrome_trace.h"
#include "sim/timeline_text.h"
#include "sim/world.h"

namespace shardbook {
namespace {

// Steps of the prediction: the first may do more, the last one repeats.
constexpr std::int64_t kPredictedSteps = 3;

void adopt_peaks(const Report& shapes, Report& report) {
  const std::size_t n = std::min(shapes.ranks.size(), report.ranks.size());
  for (std::size_t rank = 0; rank < n; ++rank) {
    const RankReport& from = shapes.ranks[rank];
    RankReport& to = report.ranks[rank];
    for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
      to.peak[k].simulated = from.peak[k].counted;
    }
    to.peak_total.simulated = from.peak_total.counted;
  }
}

// Refuses at once what would fill the memory of this machine first.
void check_memory(const WorldOptions& options, const Report& shapes) {
  if (options.backend != "threads" || options.device != "cpu") return;
  const double has = static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
                     static_cast<double>(sysconf(_SC_PAGESIZE));
  double needs = 0;
  for (const RankReport& rank : shapes.ranks) needs += rank.peak_total.counted;
  SB_CHECK(needs <= has, "out of memory: the ranks need ",
           fmt::format("{:.1f}", needs / 1e9),
           " GB together, this machine has ", fmt::format("{:.1f}", has / 1e9),
           "; give smaller sizes, or --backend sim, which has shapes alone");
}

// The message of a failure on shapes in the words of the real run: "out of
// memory on meta:3: ..." becomes device 3's message.
std::string with_data(const Options& options, std::string text) {
  const std::string meta = "meta:";
  for (auto at = text.find(meta); at != std::string::npos;
       at = text.find(meta, at)) {
    text.replace(at, meta.size(), "device ");
  }
  if (text.rfind("out of memory", 0) != 0) return text;
  return "--device-memory " + std::to_string(options.device_memory_bytes) +
         ": " + text;
}

// A GPU's own time is measured.
bool keeps_virtual_time(const WorldOptions& options) {
  return options.backend == "sim" || options.device == "cpu";
}

const char* number_name(double value) {
  return std::isnan(value) ? "nan" : "infinite";
}

// For chapters whose only rank has reported only its losses.
void name_not_finite(Report& report) {
  if (!report.not_finite.empty()) return;
  for (std::size_t step = 0; step < report.losses.size(); ++step) {
    const double loss = report.losses[step];
    if (std::isfinite(loss)) continue;
    report.not_finite = fmt::format("the loss is {} from step {} on, on rank 0",
                                    number_name(loss), step);
    return;
  }
}

// The rank whose numbers were first not finite; empty where all are finite.
// Collective; the answer is on rank 0.
std::string first_not_finite(ProcessGroup& world, const TrainingLog& log) {
  const TrainingLog::NotFinite& mine = log.not_finite;
  const std::vector<std::string> texts = world.collect(fmt::format(
      "{} {:d} {:d}", mine.step, mine.is_own_loss, mine.is_gradient));
  std::int64_t first = -1;
  bool is_gradient = false;
  std::vector<int> owners;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream in(texts[rank]);
    std::int64_t step = -1;
    bool is_own = false, from_gradient = false;
    in >> step >> is_own >> from_gradient;
    if (step < 0 || (first >= 0 && step > first)) continue;
    if (step != first) owners.clear();
    first = step;
    is_gradient = from_gradient;
    if (is_own) owners.push_back(static_cast<int>(rank));
  }
  if (first < 0) return "";
  if (is_gradient) {
    return fmt::format("the gradient of all ranks is not finite in step {}",
                       first);
  }
  const double loss = log.losses[static_cast<std::size_t>(first)];
  return fmt::format(
      "the loss is {} from step {} on{}", number_name(loss), first,
      owners.empty() ? "" : fmt::format(", first on rank {}", owners.front()));
}

}  // namespace

Options on_shapes(const Options& options) {
  Options shapes = options;
  shapes.backend = "sim";
  shapes.device = "cpu";
  shapes.rendezvous_sends = false;
  shapes.steps = std::min(options.steps, kPredictedSteps);
  shapes.is_prediction = true;
  shapes.save.clear();
  shapes.trace.clear();
  shapes.logits.clear();
  shapes.timeline.clear();
  shapes.report.clear();
  return shapes;
}

std::shared_ptr<const sim::CostModel> cost_model(const WorldOptions& options) {
  if (options.cluster == "none") {
    SB_CHECK(options.backend != "sim",
             "--cluster none: --backend sim needs a cluster");
    return nullptr;
  }
  return std::make_shared<sim::CostModel>(read_cluster(options.cluster));
}

sim::Cluster read_cluster(const std::string& name) {
  try {
    return sim::Cluster::read(name);
  } catch (const Error& error) {
    SB_FAIL("--cluster ", name, ": ", error.what());
  }
}

Device make_device(const WorldOptions& options, int i, bool on_shapes) {
  const std::int64_t capacity = options.device_memory_bytes;
  if (on_shapes || options.backend == "sim") return Device::meta(i, capacity);
  if (options.device == "cuda") return Device::cuda(i % num_gpus(), capacity);
  return Device::cpu(i, capacity);
}

void check_world_size(const WorldOptions& options) {
  const auto cost = cost_model(options);
  if (cost == nullptr) return;
  const int devices = cost->cluster().num_devices();
  SB_CHECK(options.world_size <= devices, "--world-size ", options.world_size,
           ": --cluster ", options.cluster, " has ",
           how_many(devices, "device"));
}

Report with_prediction(
    const Options& options,
    const std::function<void(const Options& options, Report& report)>& run) {
  Report report;
  report.chapter = options.chapter;
  if (options.backend == "sim" || options.cluster == "none" ||
      options.steps == 0) {
    try {
      run(options, report);
    } catch (const Error& error) {
      const std::string text = error.what();
      if (text.rfind("out of memory on meta:", 0) != 0) throw;
      throw Error(with_data(options, text));
    }
    begin_run();
    name_not_finite(report);
    if (options.backend == "sim") {
      report.time.simulated_step_s = report.time.step_s;
      adopt_peaks(report, report);
    }
    return report;
  }
  Report predicted;
  try {
    run(on_shapes(options), predicted);
  } catch (const Error& error) {
    // With data it would also fail, but later, and on an arbitrary rank.
    throw Error(with_data(options, error.what()));
  }
  check_memory(options, predicted);
  begin_run();
  run(options, report);
  name_not_finite(report);
  if (!keeps_virtual_time(options)) {
    report.time.cluster = predicted.time.cluster;
    report.time.trust = predicted.time.trust;
    report.time.closed_form_s = predicted.time.closed_form_s;
  }
  report.time.simulated_step_s = predicted.time.step_s;
  adopt_peaks(predicted, report);
  return report;
}

void compare_with_reference(
    const Options& options, const std::vector<NamedTensor>& trained,
    const std::function<ReferenceRun(const Options& options)>& train_one,
    Report& report) {
  if (!options.check || options.backend == "sim") return;
  Options of_any_size = options;
  of_any_size.device_memory_bytes = 0;
  // Another order rounds f64 far below the tolerance, so use all cores.
  const int cores = options.dtype == DType::kF64 ? 0 : report.rank_threads;
  RankContext one(make_device(of_any_size, 0), /*rank=*/0, cores);
  one.deterministic = options.deterministic;
  one.allow_tf32 = options.tf32;
  const RankContext::Scope alone(one);
  report.parity = compare_with_one_device(
      options, {report.losses, report.grad_norms, trained}, train_one);
  if (report.not_finite.empty() && !report.parity.not_finite.empty()) {
    report.not_finite = fmt::format("'{}' is not finite after the last step",
                                    report.parity.not_finite);
  }
}

Report run_chapter(const Options& options, const ChapterBody& body,
                   const FoldClass& fold_class) {
  sim::WorldOptions world;
  world.launch = launch_options(options);
  const auto cost = cost_model(options);
  if (options.fold) world.fold_class = fold_class;
  // With data, clocks do not see messages of other groups. Such a run is
  // compared with a prediction by the same rule.
  world.shares_links = options.backend == "sim";
  return with_prediction(options, [&](const Options& options, Report& report) {
    world.launch.backend = options.backend;
    world.cost = keeps_virtual_time(options) ? cost : nullptr;
    std::mutex mutex;
    std::vector<sim::RankTimeline> timelines;
    sim::run_world(
        options.world_size,
        [&](ProcessGroup& group) {
          RankContext::current().allow_tf32 = options.tf32;
          body(options, group, report);
          const sim::VirtualClock* clock = sim::VirtualClock::current();
          if (clock == nullptr) return;
          const std::lock_guard<std::mutex> lock(mutex);
          for (const auto& device : clock->devices()) {
            const sim::RankTimeline& each = device->timeline();
            if (!each.events.empty()) timelines.push_back(each);
          }
        },
        world);
    std::sort(timelines.begin(), timelines.end(),
              [](const auto& a, const auto& b) { return a.rank < b.rank; });
    report.timelines = std::move(timelines);
  });
}

void note_training(const Options& options, const TrainingLog& log,
                   const sim::VirtualClock* clock, const Bill& bill,
                   Report& report) {
  report.wall_step_s = log.step_s;
  report.rank_threads = num_threads();
  if (options.backend != "sim") {
    report.losses = log.losses;
    report.grad_norms = log.grad_norms;
  }
  if (clock == nullptr) return;
  VirtualTime& time = report.time;
  time.cluster = clock->model().cluster().name;
  time.trust = clock->trust();
  time.closed_form_s = bill.step_s;
  time.capacity_bytes =
      static_cast<double>(clock->model().cluster().device.memory_bytes);
  const auto count = static_cast<double>(report.ranks.size());
  for (const RankReport& each : report.ranks) {
    const sim::TimeSummary& rank = each.time;
    time.step_s = std::max(time.step_s, rank.step_s);
    time.idle_share += rank.idle_share / count;
    time.exposed_comm_s += rank.exposed_comm_s / count;
    time.bubble_s += rank.bubble_s / count;
    for (const sim::LinkBytes& link : rank.links) {
      auto found = std::find_if(
          time.links.begin(), time.links.end(),
          [&](const auto& other) { return other.link == link.link; });
      if (found == time.links.end()) {
        found = time.links.insert(found, {link.link, 0});
      }
      found->bytes += link.bytes;
    }
  }
}

void finish_rank(const Options& options, ProcessGroup& world,
                 const TrainingLog& log, const Bill& bill, Report& report) {
  RankReport mine =
      rank_report(bill, world.sent_bytes(), RankContext::current().device);
  sim::VirtualClock* clock = sim::VirtualClock::current();
  if (clock != nullptr) mine.time = clock->main().summary();
  const std::vector<RankReport> ranks = gather_reports(world, mine);
  std::string not_finite;
  if (options.backend != "sim") not_finite = first_not_finite(world, log);
  if (!world.is_first()) return;
  report.not_finite = not_finite;
  // Weights that are not finite are not saved, and then no report is printed
  if (!not_finite.empty() && !options.save.empty()) {
    fmt::print(stderr, "{}\n", not_finite);
  }
  report.ranks = ranks;
  note_training(options, log, clock, bill, report);
}

void show_timeline(const OutputOptions& options, const Report& report) {
  if (options.timeline.empty()) return;
  if (options.timeline == "text") {
    fmt::print("{}",
               sim::timeline_text(report.timelines, sim::terminal_style()));
  } else {
    sim::write_chrome_trace(options.timeline, report.timelines);
  }
}

}  // namespace shardbook
