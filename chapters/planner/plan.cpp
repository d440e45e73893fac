#include "chapters/planner/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "chapters/common/sharded/parts.h"
#include "chapters/planner/on_shapes.h"
#include "core/check.h"

namespace shardbook::planner {
namespace {

Recompute recompute_of(const std::string& name) {
  if (name == "attention") return Recompute::kAttention;
  if (name == "blocks") return Recompute::kBlocks;
  SB_CHECK(name == "never", "--recompute ", name,
           ": the planner knows never, attention and blocks");
  return Recompute::kNothing;
}

}  // namespace

double Question::capacity() const {
  return memory_bytes > 0
             ? memory_bytes
             : static_cast<double>(base.cluster.device.memory_bytes);
}

std::string Plan::layout_text() const {
  std::string text;
  const auto add = [&](const char* axis, int degree) {
    if (degree == 1) return;
    text += fmt::format("{}{} {}", text.empty() ? "" : " x ", axis, degree);
  };
  add("tp", setup.tp);
  add("cp", setup.cp);
  add("pp", setup.pp);
  add("dp", setup.dp);
  if (text.empty()) text = "one device";
  if (setup.sequence_parallel) text += ", SP";
  if (setup.zero_stage > 0) text += fmt::format(", ZeRO-{}", setup.zero_stage);
  if (offloads) text += ", offload";
  return text;
}

std::string Plan::work_text() const {
  std::string text = fmt::format("{} x {}", setup.micro_batches, micro_batch);
  if (setup.pp > 1) {
    text += ", " + setup.schedule;
    if (setup.schedule == "interleaved")
      text += fmt::format(" {}", setup.chunks);
  }
  if (recompute != "never") text += ", recompute " + recompute;
  return text;
}

Options options_of(const Question& question) {
  Options options = shape_options();
  options.chapter = "14_hybrid_3d";
  options.world_size = question.world_size;
  options.model = question.model;
  options.dtype = question.dtype;
  options.batch = question.batch;
  options.seq = question.seq;
  options.dropout = question.dropout;
  options.cluster = question.base.cluster.name;
  return options;
}

void read_model(Question& question, const sim::Cluster& cluster) {
  const ModelConfig config = model_config(options_of(question));
  HybridJob& base = question.base;
  base.cluster = cluster;
  base.sizes.hidden = config.n_embd;
  base.sizes.heads = config.n_head;
  base.sizes.vocabulary = config.vocab_size;
  base.layers = config.n_layer;
  base.is_synchronous = false;
  base.scatters_messages = false;
  base.bucket_bytes = static_cast<double>(hybrid::HybridOptions().bucket_bytes);
}

hybrid::HybridOptions chapter_options(const Question& question,
                                      const Plan& plan) {
  hybrid::HybridOptions setup = plan.setup;
  setup.recompute = plan.recompute;
  if (setup.pp == 1) return setup;
  const int chunks = setup.schedule == "interleaved" ? setup.chunks : 1;
  std::vector<std::int64_t> layers =
      balanced_blocks(question.base.layers, setup.pp * chunks);
  ++layers.front();  // the embedding
  ++layers.back();   // the head
  setup.partition.clear();
  for (const std::int64_t each : layers) {
    setup.partition +=
        (setup.partition.empty() ? "" : ",") + std::to_string(each);
  }
  return setup;
}

HybridJob job_of(const Question& question, const Plan& plan) {
  HybridJob job = question.base;
  job.sizes.seq = question.seq;
  job.sizes.vocabulary = padded_vocabulary(job.sizes.vocabulary, plan.setup.tp);
  job.layout.tp = plan.setup.tp;
  job.layout.cp = plan.setup.cp;
  job.layout.cuts_tokens = plan.setup.sequence_parallel;
  job.layout.recompute = recompute_of(plan.recompute);
  job.layout.micro_batch = plan.micro_batch;
  job.layout.dtype = job.gradient_dtype = question.dtype;
  job.layout.dropout = question.dropout;
  job.pp = plan.setup.pp;
  job.dp = plan.setup.dp;
  job.micro_batches = plan.setup.micro_batches;
  job.chunks = plan.setup.schedule == "interleaved" ? plan.setup.chunks : 1;
  job.is_zero_bubble = plan.setup.schedule == "zb-h1";
  job.blocks = balanced_blocks(job.layers, job.pp * job.chunks);
  job.zero_stage = plan.setup.zero_stage;
  job.offloads = plan.offloads;
  job.composes_stages = true;
  return job;
}

Prediction predict_plan(const Question& question, const Plan& plan) {
  const HybridJob job = job_of(question, plan);
  return {plan, hybrid_step(job), step_memory(job)};
}

double mfu(const Question& question, const Prediction& prediction) {
  const HybridJob job = job_of(question, prediction.plan);
  const auto peak =
      question.base.cluster.device.peak_flops.find(question.dtype);
  SB_CHECK(peak != question.base.cluster.device.peak_flops.end(), "--dtype ",
           dtype_name(question.dtype), ": the peak of ",
           question.base.cluster.device.name, " is not known in it");
  return model_flops(job) / question.world_size / peak->second /
         prediction.step.seconds;
}

double tokens_per_s(const Question& question, const Prediction& prediction) {
  return static_cast<double>(question.batch * question.seq) /
         prediction.step.seconds;
}

}  // namespace shardbook::planner
