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
  add("tp", how.tp);
  add("cp", how.cp);
  add("pp", how.pp);
  add("dp", how.dp);
  if (text.empty()) text = "one device";
  if (how.sequence_parallel) text += ", SP";
  if (how.zero_stage > 0) text += fmt::format(", ZeRO-{}", how.zero_stage);
  if (offloads) text += ", offload";
  return text;
}

std::string Plan::work_text() const {
  std::string text = fmt::format("{} x {}", how.micro_batches, micro_batch);
  if (how.pp > 1) {
    text += ", " + how.schedule;
    if (how.schedule == "interleaved") text += fmt::format(" {}", how.chunks);
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
  hybrid::HybridOptions how = plan.how;
  how.recompute = plan.recompute;
  if (how.pp == 1) return how;
  const int chunks = how.schedule == "interleaved" ? how.chunks : 1;
  std::vector<std::int64_t> layers =
      balanced_blocks(question.base.layers, how.pp * chunks);
  ++layers.front();  // the embedding
  ++layers.back();   // the head
  how.partition.clear();
  for (const std::int64_t each : layers) {
    how.partition += (how.partition.empty() ? "" : ",") + std::to_string(each);
  }
  return how;
}

HybridJob job_of(const Question& question, const Plan& plan) {
  HybridJob job = question.base;
  job.sizes.seq = question.seq;
  job.sizes.vocabulary = padded_vocabulary(job.sizes.vocabulary, plan.how.tp);
  job.layout.tp = plan.how.tp;
  job.layout.cp = plan.how.cp;
  job.layout.cuts_tokens = plan.how.sequence_parallel;
  job.layout.recompute = recompute_of(plan.recompute);
  job.layout.micro_batch = plan.micro_batch;
  job.layout.dtype = job.gradient_dtype = question.dtype;
  job.layout.dropout = question.dropout;
  job.pp = plan.how.pp;
  job.dp = plan.how.dp;
  job.micro_batches = plan.how.micro_batches;
  job.chunks = plan.how.schedule == "interleaved" ? plan.how.chunks : 1;
  job.is_zero_bubble = plan.how.schedule == "zb-h1";
  job.blocks = balanced_blocks(job.layers, job.pp * job.chunks);
  job.zero_stage = plan.how.zero_stage;
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
