#include "tests/report/fixtures.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "sim/timeline_json.h"

namespace shardbook::report {
namespace {

using Json = nlohmann::ordered_json;
using sim::RankTimeline;
using sim::TimelineEvent;

constexpr int kLayers = 12;
constexpr double kLayerFlops = 4.2e9;  // forward, of one rank's samples
constexpr double kFlopsPerS = 1.2e14;
constexpr double kLinkBytesPerS = 2.2e11;
constexpr std::int64_t kLayerBytes = 28'311'552;       // parameters, f32
constexpr std::int64_t kActivationBytes = 18'874'368;  // of one layer

// Writes one rank's timeline; each queue does one thing after the other.
class Recorder {
 public:
  explicit Recorder(int rank, double slowdown = 1) : slowdown_(slowdown) {
    timeline_.rank = rank;
  }

  double now(const std::string& queue) { return free_s_[queue]; }

  // Starts when the queue is free, and not before `ready_s`; returns the end.
  double run(const std::string& queue, const char* name,
             const std::string& label, const char* category, double seconds,
             double ready_s = 0, double flops = 0, double bytes = 0) {
    TimelineEvent event;
    event.name = name;
    event.label = label;
    event.category = category;
    event.queue = queue;
    event.begin_s = std::max(free_s_[queue], ready_s);
    event.end_s = event.begin_s + seconds;
    event.flops = flops;
    event.bytes = bytes;
    free_s_[queue] = event.end_s;
    timeline_.events.push_back(event);
    return event.end_s;
  }

  double compute(const char* name, const std::string& label,
                 const char* category, double flops, double ready_s = 0) {
    return run("compute", name, label_.empty() ? label : label_, category,
               slowdown_ * flops / kFlopsPerS + 4e-6, ready_s, flops,
               flops / 200);
  }

  // Half of a collective's latency plus bytes over bandwidth.
  double communicate(const std::string& queue, const char* name,
                     const std::string& label, double bytes, double ready_s) {
    return run(queue, name, label, "comm", 12e-6 + bytes / kLinkBytesPerS,
               ready_s, 0, bytes);
  }

  // Computing stands still until `until_s`: for a message that is sent at
  // `sent_s`.
  void wait(double sent_s, double until_s) {
    const double from_s = free_s_["compute"];
    const double sent = std::clamp(sent_s, from_s, std::max(from_s, until_s));
    if (sent > from_s) run("compute", "wait", "", "bubble", sent - from_s);
    if (until_s > sent) run("compute", "wait", "", "exposed", until_s - sent);
  }

  // What the operations to come are for.
  void label(const std::string& label) { label_ = label; }

  void message(const char* name, int peer, std::int64_t number, double begin_s,
               double end_s, double bytes) {
    free_s_["comm pp"] = begin_s;
    run("comm pp", name, "", "comm", end_s - begin_s, 0, 0, bytes);
    timeline_.events.back().peer = peer;
    timeline_.events.back().message = number;
  }

  void memory(double time_s, MemoryKind kind, std::int64_t change) {
    changes_.push_back({time_s, kind, change});
  }

  RankTimeline finish(double end_s) {
    std::stable_sort(
        changes_.begin(), changes_.end(),
        [](const Change& a, const Change& b) { return a.time_s < b.time_s; });
    sim::MemorySample sample;
    for (const Change& change : changes_) {
      sample.time_s = change.time_s;
      sample.bytes[static_cast<std::size_t>(change.kind)] += change.bytes;
      timeline_.memory.push_back(sample);
    }
    timeline_.steps = {0, end_s};
    return timeline_;
  }

 private:
  struct Change {
    double time_s;
    MemoryKind kind;
    std::int64_t bytes;
  };
  double slowdown_;
  std::string label_;
  RankTimeline timeline_;
  std::map<std::string, double> free_s_;
  std::vector<Change> changes_;
};

// The operations of one layer, forward or backward; returns the end.
double layer(Recorder& rank, int i, bool forward, double ready_s = 0) {
  const char* category = forward ? "forward" : "backward";
  const double times = forward ? 1 : 2;
  const std::string name = fmt::format("h.{}", i);
  rank.compute("layer_norm", name + ".ln_1", category, 4e7 * times, ready_s);
  rank.compute("matmul", name + ".attn.c_attn", category,
               0.25 * kLayerFlops * times);
  rank.compute("attention", name + ".attn", category,
               0.15 * kLayerFlops * times);
  rank.compute("matmul", name + ".attn.c_proj", category,
               0.08 * kLayerFlops * times);
  rank.compute("matmul", name + ".mlp.c_fc", category,
               0.26 * kLayerFlops * times);
  return rank.compute("matmul", name + ".mlp.c_proj", category,
                      0.26 * kLayerFlops * times);
}

// Buckets of two layers are reduced beside the backward pass. A collective
// starts when the last rank has joined: `joined_s` has the times of the slowest
// rank, which adds its own.
RankTimeline ddp_rank(int number, double slowdown,
                      std::vector<double>& joined_s) {
  Recorder rank(number, slowdown);
  std::size_t bucket = 0;
  rank.memory(0, MemoryKind::kParameter, kLayers * kLayerBytes);
  rank.memory(0, MemoryKind::kOptimizerState, 2 * kLayers * kLayerBytes);
  rank.memory(0, MemoryKind::kCommunication, kLayers * kLayerBytes);
  rank.run("host", "copy", "input", "copy", 3e-5, 0, 0, 65536);
  double end_s = rank.now("host");
  for (int i = 0; i < kLayers; ++i) {
    end_s = layer(rank, i, true, end_s);
    rank.memory(end_s, MemoryKind::kActivation, kActivationBytes);
  }
  for (int i = kLayers - 1; i >= 0; --i) {
    end_s = layer(rank, i, false);
    rank.memory(end_s, MemoryKind::kActivation, -kActivationBytes);
    rank.memory(end_s, MemoryKind::kGradient, kLayerBytes);
    if (i % 2 == 0) {
      if (joined_s.size() == bucket) joined_s.push_back(end_s);
      rank.communicate("comm world", "all_reduce",
                       fmt::format("bucket {}", bucket), 1.5 * 2 * kLayerBytes,
                       joined_s[bucket]);
      ++bucket;
    }
  }
  const double reduced_s = rank.now("comm world");
  for (int i = 0; i < kLayers; ++i) {
    rank.run("compute", "adamw", fmt::format("h.{}", i), "optimizer", 6e-5,
             reduced_s, 0, 7.0 * kLayerBytes);
  }
  return rank.finish(rank.now("compute"));
}

// Rank 3 is slow.
std::vector<RankTimeline> ddp_ranks() {
  std::vector<double> joined_s;
  const RankTimeline slow = ddp_rank(3, 1.15, joined_s);
  std::vector<RankTimeline> ranks;
  for (int r = 0; r < 3; ++r) ranks.push_back(ddp_rank(r, 1, joined_s));
  ranks.push_back(slow);
  return ranks;
}

// Each layer is gathered before its use and released after it.
RankTimeline zero_rank(int number) {
  Recorder rank(number);
  rank.memory(0, MemoryKind::kParameter, kLayers * kLayerBytes / 4);
  rank.memory(0, MemoryKind::kOptimizerState, kLayers * kLayerBytes / 2);
  double end_s = 0;
  double released_s = 0;  // one layer ahead is gathered, and no more
  const auto use = [&](int i, bool forward) {
    const double gathered_s =
        rank.communicate("unshard", "all_gather", fmt::format("h.{}", i),
                         0.75 * kLayerBytes, released_s);
    released_s = end_s;
    rank.memory(gathered_s, MemoryKind::kCommunication, kLayerBytes);
    end_s = layer(rank, i, forward, gathered_s);
    rank.memory(end_s, MemoryKind::kCommunication, -kLayerBytes);
    rank.memory(end_s, MemoryKind::kActivation,
                forward ? kActivationBytes : -kActivationBytes);
    if (forward) return;
    const double reduced_s =
        rank.communicate("comm world", "reduce_scatter", fmt::format("h.{}", i),
                         0.75 * kLayerBytes, end_s);
    rank.memory(end_s, MemoryKind::kGradient, kLayerBytes);
    rank.memory(reduced_s, MemoryKind::kGradient, -3 * kLayerBytes / 4);
  };
  for (int i = 0; i < kLayers; ++i) use(i, true);
  for (int i = kLayers - 1; i >= 0; --i) use(i, false);
  rank.run("compute", "adamw", "flat parameter", "optimizer", 1.8e-4,
           rank.now("comm world"), 0, 7.0 * kLayers * kLayerBytes / 4);
  return rank.finish(rank.now("compute"));
}

// GPipe: 4 stages of 3 layers, 8 micro-batches, all forward then all backward.
std::vector<RankTimeline> pipeline_ranks() {
  constexpr int kStages = 4, kMicro = 8;
  constexpr double kBytes = 1.5e6;
  constexpr double kWire = 12e-6 + kBytes / kLinkBytesPerS;
  std::vector<Recorder> stages;
  for (int s = 0; s < kStages; ++s) {
    stages.emplace_back(s);
    stages[s].memory(0, MemoryKind::kParameter, 3 * kLayerBytes);
    stages[s].memory(0, MemoryKind::kOptimizerState, 6 * kLayerBytes);
    stages[s].memory(0, MemoryKind::kGradient, 3 * kLayerBytes);
  }
  for (const bool forward : {true, false}) {
    for (int m = 0; m < kMicro; ++m) {
      double arrived_s = 0;
      for (int k = 0; k < kStages; ++k) {
        const int s = forward ? k : kStages - 1 - k;
        const int next = forward ? s + 1 : s - 1;
        double end_s = arrived_s;
        stages[s].wait(end_s - (k == 0 ? 0 : kWire), end_s);
        stages[s].label(fmt::format("micro-batch {}", m));
        for (int i = 0; i < 3; ++i) {
          end_s = layer(stages[s], 3 * s + i, forward, end_s);
        }
        stages[s].memory(end_s, MemoryKind::kActivation,
                         (forward ? 1 : -1) * 3 * kActivationBytes / 4);
        if (next < 0 || next >= kStages) continue;
        arrived_s = end_s + kWire;
        stages[s].message("send", next, m, end_s, arrived_s, kBytes);
        stages[next].message("recv", s, m, end_s, arrived_s, 0);
      }
    }
  }
  double end_s = 0;
  for (Recorder& stage : stages) {
    stage.label("");
    stage.run("compute", "adamw", "", "optimizer", 2e-4);
    end_s = std::max(end_s, stage.now("compute"));
  }
  std::vector<RankTimeline> ranks;
  for (Recorder& stage : stages) ranks.push_back(stage.finish(end_s));
  return ranks;
}

// ---- The JSON around the timelines.

Json pair(double counted) {
  return {{"predicted", static_cast<std::int64_t>(counted)},
          {"counted", static_cast<std::int64_t>(counted)}};
}

Json bill(const RankTimeline& rank) {
  std::array<std::int64_t, kNumMemoryKinds> peak{};
  for (const sim::MemorySample& sample : rank.memory) {
    for (std::size_t k = 0; k < peak.size(); ++k) {
      peak[k] = std::max(peak[k], sample.bytes[k]);
    }
  }
  Json kinds;
  for (std::size_t k = 0; k < peak.size(); ++k) {
    kinds[memory_kind_name(static_cast<MemoryKind>(k))] = {
        {"simulated", peak[k]}, {"counted", peak[k]}};
  }
  return kinds;
}

Json held() { return {{"parameter", pair(4096)}, {"activation", pair(1024)}}; }

Json run_json(const char* chapter, const char* backend, int world_size) {
  return {
      {"chapter", chapter},
      {"options",
       {{"world_size", world_size},
        {"backend", backend},
        {"model", "gpt2"},
        {"steps", 1},
        {"dtype", "f32"},
        {"optimizer", "adamw"}}},
      {"loss", {{"first", 5.5301}, {"last", 3.1702}}},
      {"parity", {{"max_abs", 3e-6}, {"max_rel", 1.8e-4}, {"tolerance", 1e-3}}},
      {"claims",
       {{"numbers", "passed"}, {"bytes", "passed"}, {"memory", "passed"}}},
      {"virtual", nullptr},
      {"wall", {{"step_s", 0.0219 / world_size + 0.004}}}};
}

double sent_by(const RankTimeline& rank) {
  double bytes = 0;
  for (const TimelineEvent& event : rank.events) {
    if (event.category == "comm") bytes += event.bytes;
  }
  return bytes;
}

Json virtual_json(const std::vector<RankTimeline>& ranks) {
  double end_s = 0, busy_s = 0;
  for (const RankTimeline& rank : ranks) {
    end_s = std::max(end_s, rank.steps.back());
  }
  for (const TimelineEvent& event : ranks.front().events) {
    if (event.queue == "compute") busy_s += event.end_s - event.begin_s;
  }
  return {{"cluster", "dgx-a100"},
          {"trust", "interpolated"},
          {"step_s", {{"closed_form", end_s}, {"counted", end_s}}},
          {"idle_share", 1 - busy_s / end_s},
          {"exposed_comm_s", 0.8 * (end_s - busy_s)},
          {"links",
           {{{"link", "nvlink"}, {"bytes", sent_by(ranks.front())}},
            {{"link", "pcie"}, {"bytes", 65536}}}},
          {"timeline", Json::parse(sim::timeline_json(ranks))}};
}

Json with_ranks(Json run, const std::vector<RankTimeline>& ranks) {
  for (const RankTimeline& rank : ranks) {
    run["bytes"].push_back(pair(sent_by(rank)));
    run["held_memory"].push_back(held());
    run["peak_memory"].push_back(bill(rank));
  }
  run["virtual"] = virtual_json(ranks);
  return run;
}

Json failed_run() {
  Json run = run_json("99_<b>&\"hostile\"</script>", "gloo", 2);
  run["bytes"] = {pair(64), {{"predicted", 64}, {"counted", 96}}};
  run["claims"]["bytes"] = "failed";
  run["virtual"] = {{"cluster", "<i>this</i>"},
                    {"step_s", {{"closed_form", 1e-3}, {"counted", 1.1e-3}}},
                    {"idle_share", 0.25},
                    {"exposed_comm_s", 0}};
  return run;
}

}  // namespace

std::vector<std::string> fixture_runs() {
  Json one = run_json("00_single_device", "threads", 1);
  one["parity"]["max_rel"] = 0;
  one["bytes"] = {pair(0)};
  const std::vector<RankTimeline> ddp = ddp_ranks();
  one["held_memory"] = {held()};
  one["peak_memory"] = {bill(ddp.front())};
  Json again = run_json("05_gpipe", "sim", 4);
  again["options"]["variant"] = "gpipe-again";
  std::vector<RankTimeline> zero;
  for (int r = 0; r < 4; ++r) zero.push_back(zero_rank(r));
  return {one.dump(),
          with_ranks(run_json("02_ddp", "threads", 4), ddp).dump(),
          with_ranks(run_json("03_zero_fsdp", "threads", 4), zero).dump(),
          with_ranks(run_json("05_gpipe", "sim", 4), pipeline_ranks()).dump(),
          with_ranks(again, pipeline_ranks()).dump(),
          failed_run().dump()};
}

}  // namespace shardbook::report
