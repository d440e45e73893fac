// Section "shardbook", and DeepSpeed's own names of what it has.

#include <algorithm>

#include "chapters/15_engine/internal/config_writer.h"

namespace shardbook::engine {
namespace {

using internal::has_object;
using internal::kMostNumber;
using internal::section;
using internal::Writer;
using json_file::Json;
using json_file::JsonObject;

void num_experts(JsonObject& object, std::vector<int>& to) {
  const Json* counts = object.find("num_experts");
  const std::string where = object.where("num_experts");
  object.check(counts != nullptr, where,
               ": missing; give a number of experts, or a list with one for "
               "each layer; or ep_size alone, for a model that has its own");
  if (counts == nullptr) return;
  const Json list = counts->is_array() ? *counts : Json::array({*counts});
  const bool fits = !list.empty() && list.size() <= 4096;
  object.check(fits, where, ": give a number, or a list of 1 to 4096 numbers");
  if (!fits) return;
  for (const Json& each : list) {
    int number = 1;
    const Json one = {{"num_experts", each}};
    JsonObject(one, object.file(), "/shardbook/experts", object.problems())
        .integer("num_experts", 1, 1 << 20, number);
    to.push_back(number);
  }
}

void num_experts(Writer& object, const std::vector<int>& numbers) {
  object.list("num_experts", numbers);
}

template <typename Fields>
void expert_keys(Fields object, BookConfig& book) {
  moe::MoeOptions& moe = book.moe;
  moe::GateOptions& gate = moe.gate;
  num_experts(object, moe.num_experts);
  object.integer("ep_size", 0, 1 << 16, book.ep_size);
  object.whole("top_k", 1, 1 << 16, gate.k);
  object.number("capacity_factor", 0.01, kMostNumber, gate.capacity_factor);
  object.whole("min_capacity", 0, 1 << 30, gate.min_capacity);
  object.choice("noisy_gate_policy", {"None", "Jitter", "RSample"},
                book.noisy_gate_policy);
  object.flag("drop_tokens", gate.drop_tokens);
  object.flag("use_rts", gate.use_rts);
  object.number("aux_coefficient", 0, kMostNumber, moe.aux_coefficient);
  object.flag("use_residual", moe.use_residual);
  object.flag("use_data_before_expert_parallelism",
              book.use_data_before_expert_parallelism);
  object.flag("enable_expert_tensor_parallelism", moe.expert_tensor_parallel);
}

/// Choices that have names of their own in DeepSpeed.
void read_parallel_names(JsonObject& root, DeepSpeedConfig& config) {
  hybrid::HybridOptions& to = config.degrees;
  JsonObject autotp = section(root, "tensor_parallel");
  autotp.integer("autotp_size", 0, 1 << 16, to.tp);
  to.tp = std::max(to.tp, 1);
  for (const char* name : {"tp", "tensor_parallel"}) {
    JsonObject group = section(autotp, name);
    int size = 1;
    group.integer("tp_size", 0, 1 << 16, size);
    if (group.find("tp_size") == nullptr) continue;
    const bool agrees = size == 1 || to.tp == 1 || size == to.tp;
    group.check(agrees, group.where("tp_size"), ": ", size,
                " is not /tensor_parallel/autotp_size ", to.tp,
                "; leave it out");
    config.remarks.push_back("/tensor_parallel/" + std::string(name) +
                             "/tp_size: has no effect here: "
                             "/tensor_parallel/autotp_size says it");
  }
  root.integer("sequence_parallel_size", 1, 1 << 16, to.cp);
  if (root.find("sequence_parallel_size") != nullptr) to.cp_kind = "ulysses";
  root.flag("use_data_before_expert_parallelism",
            config.book.use_data_before_expert_parallelism);
}

template <typename Fields>
void book_keys(Fields& object, DeepSpeedConfig& config) {
  BookConfig& book = config.book;
  hybrid::HybridOptions& degrees = config.degrees;
  auto tensor = section(object, "tensor_parallel");
  tensor.integer("size", 1, 1 << 16, degrees.tp);
  tensor.choice("mode", {"1d", "2d", "2.5d", "3d"}, book.tensor_parallel_mode);
  tensor.integer("depth", 1, 1 << 16, book.tensor_parallel_depth);
  tensor.flag("sequence_parallel", degrees.sequence_parallel);
  auto context = section(object, "context_parallel");
  context.integer("size", 1, 1 << 16, degrees.cp);
  context.choice("kind", {"ring", "rsa", "ulysses"}, degrees.cp_kind);
  context.choice("layout", {"contiguous", "zigzag", "striped"},
                 degrees.cp_layout);
  object.text("schedule", degrees.schedule);
  object.integer("chunks", 2, 1 << 16, degrees.chunks);
  object.choice("recompute", {"never", "attention", "blocks"}, book.recompute);
  object.choice("sharding", {"zero", "fsdp", "fsdp2"}, book.sharding);
}

}  // namespace

void internal::read_book(JsonObject& root, DeepSpeedConfig& config) {
  read_parallel_names(root, config);
  JsonObject object = section(root, "shardbook");
  const auto keep_one = [&](const char* own, const std::string& other) {
    const Json* json = root.find(other.substr(1, other.find('/', 1) - 1));
    object.check(object.find(own) == nullptr || json == nullptr,
                 object.where(own), ": ", other,
                 " is in the file as well; keep one of them");
  };
  keep_one("tensor_parallel", "/tensor_parallel/autotp_size");
  keep_one("context_parallel", "/sequence_parallel_size");
  book_keys(object, config);
  JsonObject experts = section(object, "experts");
  if (!has_object(object, "experts")) return;
  // Of a model that has its own, ep_size is all that a config can say
  const Json& given = *object.find("experts");
  if (given.size() == 1 && given.contains("ep_size")) {
    experts.integer("ep_size", 0, 1 << 16, config.book.ep_size);
  } else {
    expert_keys(experts, config.book);
  }
}

void internal::write_book(Writer& root, DeepSpeedConfig& config) {
  Writer object = section(root, "shardbook");
  book_keys(object, config);
  if (config.book.has_experts()) {
    expert_keys(section(object, "experts"), config.book);
  } else if (config.book.ep_size > 0) {
    section(object, "experts")
        .integer("ep_size", 0, 1 << 16, config.book.ep_size);
  }
}

}  // namespace shardbook::engine
