#include "bench/validate/table_rows.h"

#include <fmt/format.h>

#include "core/check.h"

namespace shardbook::validate {

HybridJob gpt_job(const Row& row, int vocabulary, const char* seq) {
  HybridJob job;
  job.sizes.vocabulary =
      vocabulary > 0 ? vocabulary : row.count("vocab", kMaxSize);
  job.sizes.hidden = row.count("hidden", 1 << 17);
  job.sizes.heads = row.count("heads", 1 << 12);
  job.sizes.seq = row.count(seq, kMaxSize);
  job.layers = row.count("layers", kMaxLayers);
  SB_CHECK(job.sizes.hidden % job.sizes.heads == 0, row.place(), ": hidden is ",
           job.sizes.hidden, ", which is no multiple of ", job.sizes.heads,
           " heads");
  return job;
}

bool is_set(const Row& row, const char* column) {
  return row.has(column) && row.flag(column);
}

std::string describe_on_gpus(const std::string& model, const HybridJob& job) {
  return fmt::format("{}, sequence {}, {} x {} on {} GPUs", model,
                     job.sizes.seq, job.micro_batches, job.layout.micro_batch,
                     job.ranks());
}

}  // namespace shardbook::validate
