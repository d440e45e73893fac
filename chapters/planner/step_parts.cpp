#include "chapters/planner/step_parts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <tuple>

#include "chapters/common/models/block.h"
#include "chapters/planner/on_shapes.h"
#include "core/check.h"
#include "core/context.h"
#include "core/how_many.h"

namespace shardbook::planner {
namespace {

/// Multiply-adds of a product for one token.
double products_of(const BlockPart& part) {
  return static_cast<double>(part.in * part.out * part.chosen);
}

/// The share of the update of all parameters that this rank performs.
double own_share(const HybridJob& job, const StageRun& run) {
  if (job.zero_stage == 0) return 1;
  const double experts = run.expert_parameters / run.parameters;
  double share = (1 - experts) / job.replicas();
  if (experts > 0) {
    const auto sharing = Ranks(job).of_experts().size();
    share += experts / static_cast<double>(sharing);
  }
  return share;
}

}  // namespace

std::vector<StageParts> stages_of(const HybridJob& job) {
  const std::int64_t stages = std::int64_t{job.pp} * job.chunks;
  std::vector<std::int64_t> blocks = job.blocks;
  if (blocks.empty()) {
    SB_CHECK(job.layers % stages == 0 || (job.layers + 2) % stages == 0,
             how_many(job.layers, "block"),
             ", also with embedding and head counted as blocks, do not "
             "divide by ",
             how_many(stages, "stage"));
    blocks = balanced_blocks(job.layers, static_cast<int>(stages));
  }
  SB_CHECK(static_cast<std::int64_t>(blocks.size()) == stages, blocks.size(),
           " numbers of blocks for ", how_many(stages, "stage"));
  std::vector<StageParts> parts;
  std::int64_t dense = job.sizes.dense_blocks();
  for (const std::int64_t each : blocks) {
    parts.push_back({each});
    parts.back().dense = std::min(each, dense);
    dense -= parts.back().dense;
  }
  parts.front().has_embedding = true;
  parts.back().has_head = true;
  parts.front().is_tied = job.pp == 1 && job.is_tied;
  return parts;
}

std::vector<std::int64_t> balanced_blocks(std::int64_t layers, int stages) {
  std::int64_t each = layers / stages, more = layers % stages;
  const bool counts_ends = more > 0 && (layers + 2) % stages == 0;
  if (counts_ends) each = (layers + 2) / stages, more = 0;
  std::vector<std::int64_t> blocks(static_cast<std::size_t>(stages), each);
  if (counts_ends) {
    --blocks.front();
    --blocks.back();
  }
  for (std::int64_t i = 0; i < more; ++i) {
    ++blocks[static_cast<std::size_t>(stages - 2 - i)];
  }
  return blocks;
}

int place_of(const HybridJob& job, int pp_rank, int count) {
  const sim::Cluster& cluster = job.cluster;
  const int devices = cluster.devices_per_node;
  const int own = Ranks(job).at_stage(pp_rank) % devices;
  if (own == 0 || devices % count != 0) return own;
  const auto links_from = [&](int place) {
    std::vector<std::array<int, 3>> links;
    for (const sim::MeshLink& each : cluster.mesh) {
      const int a = std::min(each.a, each.b) - place;
      const int b = std::max(each.a, each.b) - place;
      if (a >= 0 && b < count) links.push_back({a, b, each.count});
    }
    std::sort(links.begin(), links.end());
    return links;
  };
  const auto links = links_from(own);
  for (int place = 0; place < own; place += count) {
    if (links_from(place) == links) return place;
  }
  return own;
}

const sim::Cluster& cluster_from(const sim::Cluster& cluster,
                                 const HybridJob& job, int pp_rank) {
  if (cluster.mesh.empty()) return cluster;
  const StageLayout& layout = job.layout;
  const int place = place_of(job, pp_rank, layout.tp * layout.cp * layout.ep);
  if (place == 0) return cluster;
  return once_for(std::tuple(cluster.name, cluster.device.sustained, place),
                  [&] {
                    sim::Cluster moved = cluster;
                    moved.name += " from device " + std::to_string(place);
                    const int devices = cluster.devices_per_node;
                    for (sim::MeshLink& each : moved.mesh) {
                      each.a = (each.a - place + devices) % devices;
                      each.b = (each.b - place + devices) % devices;
                    }
                    return moved;
                  });
}

std::vector<StageRun> runs_of(const HybridJob& job) {
  sim::Cluster cluster = job.cluster;
  StageLayout layout = job.layout;
  layout.splits_backward = job.is_zero_bubble;
  if (job.overlaps_tensor && layout.tp > 1) {
    cluster.name += " with overlap";
    cluster.intra_node.bytes_per_s *= layout.tp;
    cluster.intra_node.reduction_bytes_per_s *= layout.tp;
  }
  const auto run_of = [&](const sim::Cluster& from,
                          const StageParts& parts) -> StageRun {
    if (!job.composes_stages) {
      return known_stage(from, job.sizes, layout, parts);
    }
    return composed_stage(from, job.sizes, layout, parts);
  };
  const std::vector<StageParts> stages = stages_of(job);
  std::vector<StageRun> runs;
  const sim::Cluster* before = nullptr;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const sim::Cluster* const from =
        &cluster_from(cluster, job, static_cast<int>(i) % job.pp);
    const bool is_known =
        from == before && stages[i].key() == stages[i - 1].key();
    runs.push_back(is_known ? runs.back() : run_of(*from, stages[i]));
    before = from;
  }
  return runs;
}

std::vector<StageRun> ranks_of(const HybridJob& job,
                               const std::vector<StageRun>& runs) {
  std::vector<StageRun> ranks(static_cast<std::size_t>(job.pp));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const StageRun& run = runs[i];
    StageRun& rank = ranks[i % ranks.size()];
    rank.forward.s += run.forward.s;
    rank.backward.s += run.backward.s;
    rank.busy_s += run.busy_s;
    rank.optimizer_s += run.optimizer_s * own_share(job, run);
    rank.parameters += run.parameters;
    rank.expert_parameters += run.expert_parameters;
    for (const auto& [link, bytes] : run.sent_bytes) {
      rank.sent_bytes[link] += bytes;
    }
    rank.trust = std::max(rank.trust, run.trust);
  }
  return ranks;
}

double activation_bytes(const HybridJob& job) {
  return static_cast<double>(job.layout.micro_batch * job.sizes.seq *
                             job.sizes.hidden) /
         job.layout.cp * job.element();
}

double sent_activation(const HybridJob& job) {
  const bool is_part = job.scatters_messages || job.layout.cuts_tokens;
  return activation_bytes(job) / (is_part ? job.layout.tp : 1);
}

std::vector<BlockCounts> blocks_of_stages(const HybridJob& job) {
  std::vector<BlockCounts> counts;
  for (const StageParts& each : stages_of(job)) {
    counts.push_back({static_cast<double>(each.dense),
                      static_cast<double>(each.blocks - each.dense)});
  }
  return counts;
}

const std::vector<BlockPart>& block_of_kind(const HybridJob& job,
                                            bool is_dense) {
  return once_for(std::tuple(job.sizes.key(), is_dense), [&] {
    const auto& model = job.sizes.model;
    if (model == nullptr) return block_table(decoder_of(job.sizes, 1)).parts();
    return block_table(*model, is_dense ? 0 : model->n_layer - 1).parts();
  });
}

const BlockPart& attention_of(const HybridJob& job) {
  const std::vector<BlockPart>& block = block_of_kind(job, false);
  return *std::find_if(block.begin(), block.end(), [](const BlockPart& each) {
    return each.kind == PartKind::kAttention;
  });
}

double products_of(const std::vector<BlockPart>& block) {
  double products = 0;
  for (const BlockPart& part : block) {
    if (part.kind == PartKind::kProduct) products += products_of(part);
  }
  return products;
}

double block_elements(const HybridJob& job, const StageRun& whole) {
  return (whole.parameters - (job.is_tied ? 1 : 2) * job.table()) /
         static_cast<double>(job.layers);
}

double largest_matrix(const HybridJob& job, double block) {
  double all = 0, most = 0;
  for (const BlockPart& part : block_table(decoder_of(job.sizes, 1)).parts()) {
    if (part.kind != PartKind::kProduct) continue;
    all += products_of(part);
    most = std::max(most, products_of(part));
  }
  return block / (all / most);
}

const char* page_of_layers(const HybridJob& job) {
  return job.layout.tp > 1   ? "07_tensor_parallel/README.md#the-bill"
         : job.layout.cp > 1 ? "12_sequence_parallel/README.md#the-bill"
         : job.layout.ep > 1 ? "13_moe/README.md#the-bill"
                             : "00_single_device/details.md#virtual-time";
}

double in_buckets(const sim::CostModel& costs, CommOp op, double bytes,
                  double bucket_bytes, const std::vector<int>& ranks) {
  if (bucket_bytes <= 0 || bytes <= bucket_bytes) {
    return costs.collective(op, bytes, ranks).seconds;
  }
  const double buckets = std::round(bytes / bucket_bytes);
  return buckets * costs.collective(op, bytes / buckets, ranks).seconds;
}

double zero_seconds(const HybridJob& job, const sim::CostModel& costs,
                    const StageRun& run) {
  const std::vector<int> replicas = Ranks(job).of_replicas();
  const double block = block_elements(job, run), table = job.table();
  const auto blocks = static_cast<double>(job.layers);
  // Stage 3 sends the gradients of a unit as one message
  const double bucket_bytes = job.zero_stage == 3 ? 0 : job.bucket_bytes;
  const auto scatter = [&](double elements) {
    return in_buckets(costs, CommOp::kReduceScatter, elements * job.gradient(),
                      bucket_bytes, replicas);
  };
  // Shards of gradients go to the host as they come; shards of parameters come
  // from there
  const auto copy = [&](double elements) {
    if (!job.offloads) return 0.0;
    return costs.host_copy(elements / job.replicas() * job.element()).seconds;
  };
  const double forward = run.forward.s, backward = run.backward.s;
  const double reduce = std::max(scatter(block), copy(block));
  // A table of the head's own travels beside the blocks' computation; no message
  // has no latency
  const double head_back = job.is_tied ? 0 : scatter(table);
  double each = 0;
  if (job.zero_stage == 2) {
    // The last bucket overlaps with nothing
    each = forward +
           std::max(backward + reduce,
                    head_back + blocks * reduce + backward / blocks) +
           scatter(table);
  } else {
    const auto gather = [&](double elements) {
      return copy(elements) + costs
                                  .collective(CommOp::kAllGather,
                                              elements * job.element(),
                                              replicas)
                                  .seconds;
    };
    const double fetch = gather(block);
    const double head_there = job.is_tied ? 0 : gather(table);
    each = gather(table) +
           std::max(fetch + forward,
                    blocks * fetch + head_there + forward / blocks) +
           std::max(fetch + backward + reduce,
                    head_back + blocks * (fetch + reduce) + backward / blocks) +
           scatter(table);
  }
  return static_cast<double>(job.micro_batches) * each;
}

double update_on_host_seconds(const HybridJob& job, const sim::CostModel& costs,
                              double elements) {
  const double element = job.element();
  const double down = costs.host_copy(elements * element).seconds;
  // Gradient, master copy, two moments are read, the last three are written;
  // then the copy in 16 bits
  const double bytes = elements * (element + 4 + 8 + 4 + 8 + element);
  OpEvent adam{};
  adam.name = "adamw";
  adam.flops = 12 * elements;
  adam.bytes = bytes;
  adam.phase = Phase::kOptimizer;
  return down + costs.operation(adam, /*on_host=*/true).seconds + down;
}

namespace {

std::vector<SentTerm> sent_by(const HybridJob& job, const sim::CostModel& costs,
                              int rank, const StageRun& run) {
  const Ranks ranks(job);
  const auto m = static_cast<double>(job.micro_batches);
  std::vector<SentTerm> terms;
  for (const auto& [link, each] : run.sent_bytes) {
    terms.push_back(
        {"messages inside the layers", page_of_layers(job), link, m, 1, each});
  }
  // Every chunk sends to its two neighbours; the model's ends have only one
  const auto send = [&](const char* what, int to, bool is_end) {
    const int chunks = job.chunks - (is_end ? 1 : 0);
    if (job.pp == 1 || chunks == 0) return;
    const int peer = ranks.at_stage((to + job.pp) % job.pp);
    terms.push_back({what, "05_gpipe/README.md#the-bill",
                     costs.link({ranks.at_stage(rank), peer}).name, chunks * m,
                     1, sent_activation(job)});
  };
  send("activations to the next stage", rank + 1, rank == job.pp - 1);
  send("gradients to the stage before", rank - 1, rank == 0);

  // Over dp and cp; with ZeRO-3, parameters before every forward and backward
  const double scatters = job.zero_stage >= 2 ? m : 1;
  const double gathers = job.zero_stage == 3 ? 2 * m : 1;
  const auto share = [&](const std::string& link, double elements, int n) {
    const bool is_all_reduce = n > 0 && job.zero_stage == 0;
    const char* const page = is_all_reduce ? "02_ddp/README.md#the-bill"
                                           : "03_zero_fsdp/README.md#the-bill";
    terms.push_back({"gradients", page, link, is_all_reduce ? 2 : scatters,
                     elements, job.gradient(), n});
    if (is_all_reduce) return;
    terms.push_back(
        {"parameters", page, link, gathers, elements, job.element(), n});
  };
  const auto over = [&](const std::vector<int>& group, double elements) {
    if (group.size() == 1 || elements <= 0) return;
    share(costs.link(group).name, elements, static_cast<int>(group.size()));
  };
  over(ranks.of_replicas(), run.parameters - run.expert_parameters);
  over(ranks.of_experts(), run.expert_parameters);
  if (job.offloads) {
    share(job.cluster.host_link.name, run.parameters / job.replicas(), 0);
  }
  if (job.is_tied && job.pp > 1 && (rank == 0 || rank == job.pp - 1)) {
    terms.push_back({"gradients of the table",
                     "05_gpipe/details.md#the-bill-line-by-line",
                     costs.link({0, ranks.at_stage(job.pp - 1)}).name, 1,
                     job.table(), job.gradient()});
  }
  return terms;
}

}  // namespace

std::vector<SentTerm> sent_terms(const HybridJob& job,
                                 const sim::CostModel& costs,
                                 const std::vector<StageRun>& runs) {
  std::vector<SentTerm> most;
  double largest = -1;
  for (int rank = 0; rank < job.pp; ++rank) {
    std::vector<SentTerm> terms =
        sent_by(job, costs, rank, runs[static_cast<std::size_t>(rank)]);
    double total = 0;
    for (const SentTerm& each : terms) total += each.bytes();
    if (total > largest) most = std::move(terms);
    largest = std::max(largest, total);
  }
  return most;
}

// --- Work --------------------------------------------------------------------

namespace {

/// The mean of the widths of queries and of values, over all heads.
double attention_width(const HybridJob& job) {
  const DecoderSizes& sizes = job.sizes;
  if (sizes.model != nullptr) {
    const BlockPart& attention = attention_of(job);
    return static_cast<double>(attention.columns[0].width + attention.out) / 2;
  }
  return static_cast<double>(sizes.heads * sizes.head_width());
}

}  // namespace

double weight_products(const HybridJob& job) {
  const DecoderSizes& sizes = job.sizes;
  if (sizes.model != nullptr) {
    const double others = products_of(block_of_kind(job, false));
    const auto dense = static_cast<double>(sizes.dense_blocks());
    if (dense == 0) return others;
    const double more = products_of(block_of_kind(job, true)) - others;
    return others + more * dense / static_cast<double>(job.layers);
  }
  const auto h = static_cast<double>(sizes.hidden);
  const double keys =
      static_cast<double>(sizes.key_heads()) / static_cast<double>(sizes.heads);
  const double visited =
      sizes.experts > 0 ? static_cast<double>(sizes.experts_per_token) : 1;
  return h * attention_width(job) * (2 + 2 * keys) +
         visited * h * static_cast<double>(sizes.mlp_width()) *
             (sizes.is_llama && sizes.is_gated ? 3 : 2);
}

double attention_products(const HybridJob& job) {
  return 2 * static_cast<double>(job.sizes.seq) * attention_width(job);
}

double model_flops(const HybridJob& job) {
  return 6 * job.tokens() *
         (static_cast<double>(job.layers) *
              (weight_products(job) + attention_products(job)) +
          static_cast<double>(job.sizes.vocabulary * job.sizes.hidden));
}

double recomputed_flops(const HybridJob& job) {
  return model_flops(job) +
         2 * job.tokens() * static_cast<double>(job.layers) *
             (weight_products(job) + attention_products(job));
}

}  // namespace shardbook::planner
