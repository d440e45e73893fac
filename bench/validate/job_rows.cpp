#include "bench/validate/job_rows.h"

#include <fmt/format.h>

#include "core/check.h"

namespace shardbook::validate {

Job job_of(const Row& row, int vocab) {
  Job job;
  job.seq = row.count("seq_len", kMaxSize);
  job.model.vocab_size = vocab;
  job.model.n_positions = job.seq;
  job.model.n_embd = row.count("hidden", 1 << 17);
  job.model.n_layer = row.count("layers", kMaxLayers);
  job.model.n_head = row.count("heads", 1 << 12);
  SB_CHECK(job.model.n_embd % job.model.n_head == 0, row.place(),
           ": hidden is ", job.model.n_embd, ", which is no multiple of ",
           job.model.n_head, " heads");
  job.ranks = row.count("gpus", kMaxSize);
  return job;
}

std::int64_t micro_batches_of(const Row& row, const Job& job,
                              std::int64_t replicas) {
  const std::int64_t batch = row.count("global_batch");
  const std::int64_t together = replicas * job.micro_batch;
  SB_CHECK(batch % together == 0, row.place(), ": global_batch is ", batch,
           ", which is no multiple of ", replicas, " ranks times ",
           job.micro_batch, " sequences");
  SB_CHECK(batch / together <= kMaxMicroBatchesPerRank, row.place(),
           ": global_batch is ", batch, ", which makes ", batch / together,
           " micro-batches; give at most ", kMaxMicroBatchesPerRank);
  return batch / together;
}

double tokens_per_step(const Job& job) {
  return static_cast<double>(job.micro_batches * job.micro_batch * job.seq) *
         replicas_of(job);
}

double megatron_flops(const Job& job) {
  const auto h = static_cast<double>(job.model.n_embd);
  const auto s = static_cast<double>(job.seq);
  const auto layers = static_cast<double>(job.model.n_layer);
  const auto vocab = static_cast<double>(job.model.vocab_size);
  return 96 * tokens_per_step(job) * layers * h * h *
         (1 + s / (6 * h) + vocab / (16 * layers * h));
}

std::string describe(const std::string& model, const Job& job) {
  return fmt::format("{}, sequence {}, {} x {} on {} GPUs", model, job.seq,
                     job.micro_batches, job.micro_batch, job.ranks);
}

}  // namespace shardbook::validate
