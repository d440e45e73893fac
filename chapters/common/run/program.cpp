#include "chapters/common/run/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/data.h"
#include "chapters/common/run/checkpoints.h"
#include "chapters/common/run/exit_status.h"
#include "chapters/common/run/trace.h"
#include "comm/processes.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook {
namespace {

/// The part of a run that rank 0 keeps for the comparison with one device.
struct Trained {
  std::vector<NamedTensor> state;
  bool has_predictable_time = true;
};

void keep_results(const Options& options, Strategy& strategy, bool is_main,
                  Report& report, Trained& trained) {
  // Ranks on the CPU gather in memory that counts for no device. NCCL needs the
  // GPU's.
  RankContext& context = RankContext::current();
  const Device host = context.host();
  const Device where = context.device.is_cuda() ? context.device : host;
  std::vector<NamedTensor> state;
  {
    const ContextValue<Device> gathering(&RankContext::device, where);
    state = strategy.full_state();
  }
  const ContextValue<Device> saving(&RankContext::device, host);
  const std::string remarks = strategy.remarks();
  const auto more = strategy.more();
  if (!is_main) return;
  report.remarks = remarks;
  report.more.insert(report.more.end(), more.begin(), more.end());
  trained.state = state = on_host(state);
  trained.has_predictable_time = strategy.has_predictable_time();
  if (options.save.empty() && options.logits.empty()) return;
  const LoadedModel whole = strategy.whole_model(options, state);
  save_results(options, whole, Dataset::open(options, whole.config));
}

/// A repeated or skipped step takes another time than the formula's.
void note_closed_form(const Strategy& strategy, Report& report) {
  report.time.closed_form_command = strategy.closed_form_command();
  if (!strategy.has_predictable_time()) {
    report.time.closed_form_s = kNotPredicted;
  }
}

TrainingLog train_to_the_end(const Options& options, Strategy& strategy,
                             bool is_main, ProcessGroup* world) {
  Checkpoints checkpoints(options, strategy, world);
  checkpoints.load();
  const bool has_none = options.checkpoint.empty() || options.backend == "sim";
  const TrainingLog log = train(
      options, strategy.optimizer(), is_main,
      [&](std::int64_t step) { return strategy.step(step); },
      has_none ? nullptr : &checkpoints);
  strategy.finish();
  return log;
}

class RunOnRank : public Run {
 public:
  RunOnRank(const Options& options, ProcessGroup& world, Report& report,
            Trained& trained)
      : world_(world),
        report_(report),
        trained_(trained),
        trace_(options, world) {}

  void train(const Options& options, Strategy& strategy) override {
    const bool is_main = world_.is_first();
    const TrainingLog log =
        train_to_the_end(options, strategy, is_main, &world_);
    finish_rank(options, world_, log, strategy.bills().at(0), report_);
    if (is_main) note_closed_form(strategy, report_);
    trace_.write();
    if (options.backend == "sim") return;
    keep_results(options, strategy, is_main, report_, trained_);
  }

 private:
  ProcessGroup& world_;
  Report& report_;
  Trained& trained_;
  TraceScope trace_;
};

/// Several devices, all worked on by this thread's rank.
class RunOnDevices : public Run {
 public:
  RunOnDevices(const std::vector<Device>& devices, sim::VirtualClock* clock,
               Report& report, Trained& trained)
      : devices_(devices), clock_(clock), report_(report), trained_(trained) {}

  void train(const Options& options, Strategy& strategy) override {
    CopyLedger no_copies;
    CopyLedger& copies =
        strategy.copies() != nullptr ? *strategy.copies() : no_copies;
    TraceScope trace(options, devices_, copies);
    const TrainingLog log =
        train_to_the_end(options, strategy, true, /*world=*/nullptr);
    trace.write();

    const std::vector<Bill> bills = strategy.bills();
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      report_.ranks.push_back(
          rank_report(bills[i], copies.sent_bytes(devices_[i]), devices_[i]));
      if (clock_ == nullptr) continue;
      report_.ranks.back().time = clock_->devices()[i]->summary();
      report_.timelines.push_back(clock_->devices()[i]->timeline());
    }
    note_training(options, log, clock_, bills[0], report_);
    note_closed_form(strategy, report_);
    if (options.backend == "sim") return;
    keep_results(options, strategy, true, report_, trained_);
  }

 private:
  const std::vector<Device>& devices_;
  sim::VirtualClock* clock_;
  Report& report_;
  Trained& trained_;
};

Report run_on_devices(const Options& options, const ChapterRun& chapter,
                      Trained& trained) {
  const int n = options.world_size;
  const auto cost = cost_model(options);
  const int sharing = chapter.cores_shared_by > 0 ? chapter.cores_shared_by : n;
  const int cores = std::max(1, num_threads() / sharing);
  return with_prediction(options, [&](const Options& options, Report& report) {
    std::vector<Device> devices;
    for (int i = 0; i < n; ++i) devices.push_back(make_device(options, i));
    RankContext context(devices[0], /*rank=*/0, cores);
    context.deterministic = options.deterministic;
    context.allow_tf32 = options.tf32;
    const RankContext::Scope scope(context);
    std::optional<sim::ClockScope> clock;
    if (cost != nullptr && !devices[0].is_cuda()) {
      clock.emplace(*cost, 0, /*records_events=*/true);
      for (int i = 1; i < n; ++i) clock->clock().add_device(devices[i], i);
    }
    RunOnDevices run(devices, clock ? &clock->clock() : nullptr, report,
                     trained);
    chapter.devices(options, devices, run);
  });
}

/// The run on one device that the whole training is compared with. A run that
/// was resumed knows only the losses since its checkpoint.
ReferenceRun reference_of(const Options& whole, std::int64_t first_step,
                          const ChapterRun& chapter) {
  ReferenceRun run = chapter.reference(whole);
  if (first_step == 0) return run;
  run.losses.erase(run.losses.begin(), run.losses.begin() + first_step);
  run.grad_norms.clear();  // that of the first step is compared
  return run;
}

std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words;
  bool is_quoted = false, is_in_word = false;
  for (const char each : line) {
    const bool is_end = (each == ' ' || each == '\n') && !is_quoted;
    if (!is_end && !is_in_word) words.emplace_back();
    is_in_word = !is_end;
    if (each == '\'') {
      is_quoted = !is_quoted;
    } else if (!is_end) {
      words.back() += each;
    }
  }
  SB_CHECK(!is_quoted, line, ": a quote is not closed");
  return words;
}

Options with_compared(Options options, const CommandLine& line) {
  const std::vector<ComparedOption> compared = line.compared();
  options.compared.insert(options.compared.end(), compared.begin(),
                          compared.end());
  return options;
}

Report report_of(const Options& options, const ChapterRun& chapter) {
  Report report = run_and_compare(options, chapter);
  if (!report.ranks.empty() && chapter.add_to_report) {
    chapter.add_to_report(report);
  }
  return report;
}

}  // namespace

Report run_and_compare(const Options& given, const ChapterRun& chapter) {
  Options whole = given;
  whole.checkpoint.clear();
  const Options options = at_checkpoint(given);
  Trained trained;
  Report report = chapter.devices
                      ? run_on_devices(options, chapter, trained)
                      : run_chapter(
                            options,
                            [&](const Options& options, ProcessGroup& world,
                                Report& report) {
                              RunOnRank run(options, world, report, trained);
                              chapter.rank(options, world, run);
                            },
                            chapter.fold_class);
  if (report.ranks.empty()) return report;
  // On shapes, experts are chosen evenly
  const bool routes =
      (given.planned != nullptr || ModelConfig::is_named(given.model)) &&
      model_config(given).llama.num_experts > 0;
  if (!trained.has_predictable_time || (routes && given.backend != "sim"))
    report.time.simulated_step_s = kNotPredicted;
  compare_with_reference(
      whole, trained.state,
      [&](const Options& alone) {
        return reference_of(alone, options.first_step, chapter);
      },
      report);
  return report;
}

void check_run(const Options& options, const ChapterRun& chapter) {
  check_world_size(options);
  Options no_steps = on_shapes(options);
  no_steps.steps = 0;
  if (options.cluster == "none") no_steps.cluster = Options().cluster;
  run_and_compare(no_steps, chapter);
}

int program_main(const MakeProgram& program, int argc, char** argv) {
  return chapter_main([&] {
    CommandLine line({argv, argv + argc});
    const Program it = program(line);
    if (it.instead) return it.instead();
    const Options options = with_compared(it.options, line);
    // Before ranks start: each would report it
    check_world_size(options);
    at_checkpoint(options);
    if (options.backend == "gloo") {
      if (const auto status =
              launch_processes(options.world_size, launch_options(options))) {
        return *status;
      }
    }
    const std::string tokens = tokens_text(options);
    Report report = report_of(options, it.chapter);
    if (report.ranks.empty()) return 0;  // the first rank reports
    report.tokens = tokens;
    show_timeline(options, report);
    return print_report(options, line, report);
  });
}

Report run_line(const MakeProgram& program, const std::string& text) {
  const std::vector<std::string> words = words_of(text);
  for (const std::string& word : words) {
    SB_CHECK(word.rfind("--help", 0) != 0 && word != "-h", word,
             ": here, a line trains and prints nothing");
  }
  CommandLine line(words);
  const Program it = program(line);
  SB_CHECK(!it.instead, line.program(), ": this line trains nothing");
  for (const char* flag : {"--format", "--report", "--timeline"}) {
    SB_CHECK(!line.has(flag), flag,
             ": here, the report is returned and not printed");
  }
  const Options options = with_compared(it.options, line);
  SB_CHECK(options.backend == "threads" || options.backend == "sim",
           "--backend ", options.backend,
           ": here, ranks are threads or sim; processes need the program ",
           line.program());
  check_world_size(options);
  return report_of(options, it.chapter);
}

}  // namespace shardbook
