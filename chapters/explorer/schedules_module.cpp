// What pages of the book let a reader change, as a module of WebAssembly: small,
// without tensors.
//
//   shardbook_schedules('{"about": "schedule", "name": "1f1b", "ranks": 4,
//                         "micro_batches": 8}')
//
// The answer is an object; {"error": ...} has the sentence of a question that
// cannot be answered.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/06_1f1b/schedule_json.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/11_dtensor/moves.h"
#include "chapters/12_sequence_parallel/ring_exchange.h"
#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "chapters/common/pipeline/replay.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook::explorer {
namespace {

using json_file::JsonObject;
using nlohmann::json;

// --- Schedules ---------------------------------------------------------------

using pipeline::Action;
using pipeline::Schedule;

Schedule schedule_of(JsonObject& question) {
  pipeline::schedules::ScheduleOptions options;
  std::string name = "1f1b", text;
  question.integer("ranks", 1, 64, options.num_ranks);
  question.integer("micro_batches", 1, 256, options.micro_batches);
  question.integer("chunks", 1, 16, options.chunks);
  question.text("text", text);
  // Files are not read here: their text is given
  question.choice("name", pipeline::schedules::schedule_names(), name);
  question.finish();
  // A page waits for the answer
  constexpr int kMostActions = 4096, kMostText = 1 << 16;
  SB_CHECK(text.size() <= kMostText, "text of ", text.size(),
           " characters; give at most ", kMostText);
  const int actions = options.num_ranks * options.micro_batches *
                      (name == "interleaved" ? options.chunks : 1);
  SB_CHECK(actions <= kMostActions, actions,
           " forwards of all ranks; give ranks, micro_batches and chunks for "
           "at most ",
           kMostActions);
  return text.empty() ? make_schedule(name, options)
                      : pipeline::schedule_from_json(text, "schedule");
}

/// Actions with their times, and the sets of activations that each rank keeps.
json schedule_answer(JsonObject& question) {
  pipeline::Costs costs;
  question.number("forward", 0.01, 1000, costs.forward);
  question.number("backward_input", 0.01, 1000, costs.backward_input);
  question.number("backward_weight", 0.01, 1000, costs.backward_weight);
  question.number("message", 0, 1000, costs.communication);
  costs.backward = costs.backward_input + costs.backward_weight;
  const Schedule schedule = schedule_of(question);
  const pipeline::Replay replay = pipeline::replay(schedule, costs);
  json ranks = json::array();
  const auto alive =
      live_activations(schedule, replay, pipeline::Until::kWeight);
  const auto most = max_live_activations(schedule, pipeline::Until::kWeight);
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    json actions = json::array(), sets = json::array();
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const Action& action = schedule.actions[rank][i];
      const pipeline::Span& span = replay.spans[rank][i];
      // The letter, the micro-batch and the chunk
      actions.push_back({to_string(action).substr(0, 1), action.micro_batch,
                         action.chunk, span.begin, span.end});
    }
    for (const auto& [from, count] : alive[rank]) sets.push_back({from, count});
    ranks.push_back({{"actions", actions},
                     {"alive", sets},
                     {"most", most[rank]},
                     {"busy", replay.busy[rank]}});
  }
  return {{"text", to_json(schedule)},
          {"micro_batches", schedule.num_micro_batches},
          {"makespan", replay.makespan},
          {"idle_share", idle_share(replay)},
          {"ranks", ranks}};
}

// --- ZeRO --------------------------------------------------------------------

json zero_answer(JsonObject& question) {
  double parameters = 7.5e9, capacity = 80e9;
  int ranks = 64;
  std::string dtype = "bf16", optimizer = "adamw";
  OptimizerOptions options;
  question.number("parameters", 1, 1e15, parameters);
  question.number("capacity", 1, 1e15, capacity);
  question.integer("ranks", 1, 1 << 20, ranks);
  question.choice("dtype", {"f64", "f32", "bf16", "f16"}, dtype);
  question.choice("optimizer", {"sgd", "adam", "adamw"}, optimizer);
  question.number("momentum", 0, 1, options.momentum);
  question.finish();
  const zero::StateBytes bytes =
      zero::state_bytes(dtype_from_name(dtype), optimizer, options);
  json stages = json::array();
  for (int stage = 0; stage <= 3; ++stage) {
    const zero::ModelStates states =
        zero::model_states(stage, parameters, ranks, bytes);
    stages.push_back(
        {{"parameters", states.parameters},
         {"gradients", states.gradients},
         {"optimizer", states.optimizer},
         {"total", states.total()},
         {"most", zero::max_parameters(stage, capacity, ranks, bytes)}});
  }
  return {{"stages", stages},
          {"bytes", {bytes.parameter, bytes.gradient, bytes.optimizer}}};
}

// --- The mask by rank --------------------------------------------------------

namespace sp = sequence_parallel;

/// Adds the pairs of query and key of a block, as tokens.
void add_pairs(const AttentionBlock& block,
               const std::vector<std::int64_t>& queries,
               const std::vector<std::int64_t>& keys, json& pairs) {
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  for (std::int64_t i = 0; i < block.queries.size(); ++i) {
    for (std::int64_t j = 0; j < block.keys.size(); ++j) {
      if (block.causal && i + block.shift < j) continue;
      pairs.push_back({queries[at(block.queries.begin + i)],
                       keys[at(block.keys.begin + j)]});
    }
  }
}

/// Of each rank: its tokens, and what it computes in each hop of the ring.
/// Ulysses has one hop: all tokens, of a part of the heads.
json mask_answer(JsonObject& question) {
  int c = 4, heads = 4;
  std::int64_t s = 16;
  std::string kind = "contiguous";
  bool causal = true;
  question.integer("ranks", 1, 16, c);
  question.whole("tokens", 1, 64, s);
  question.integer("heads", 1, 1024, heads);
  question.choice("layout", {"contiguous", "zigzag", "striped", "ulysses"},
                  kind);
  question.flag("causal", causal);
  question.finish();
  const bool is_ulysses = kind == "ulysses";
  SB_CHECK(!is_ulysses || heads % c == 0, "heads ", heads,
           ": Ulysses gives each of ", c, " ranks as many; give a multiple of ",
           c);
  const sp::Layout layout =
      is_ulysses ? sp::Layout::kContiguous : sp::layout_of(kind);
  sp::check_sequence(layout, c, s);
  const auto everything = sp::positions(sp::Layout::kContiguous, 0, 1, s);
  const AttentionBlock whole{{0, s}, {0, s}, causal, 0};
  json ranks = json::array();
  for (int rank = 0; rank < c; ++rank) {
    const auto tokens = sp::positions(layout, rank, c, s);
    json hops = json::array();
    for (int hop = 0; hop < (is_ulysses ? 1 : c); ++hop) {
      const int source = sp::source_at(rank, hop, c);
      const auto blocks = is_ulysses ? std::vector{whole}
                                     : sp::visible_blocks(layout, rank, source,
                                                          c, s / c, causal);
      json pairs = json::array();
      double work = 0;
      for (const AttentionBlock& block : blocks) {
        add_pairs(block, is_ulysses ? everything : tokens,
                  is_ulysses ? everything : sp::positions(layout, source, c, s),
                  pairs);
        work += visible_pairs(block) * (is_ulysses ? heads / c : heads);
      }
      hops.push_back({{"source", source}, {"pairs", pairs}, {"work", work}});
    }
    ranks.push_back({{"tokens", tokens}, {"hops", hops}});
  }
  return {{"ranks", ranks}};
}

// --- Placements --------------------------------------------------------------

dtensor::Placement placement_of(const std::string& name) {
  for (const dtensor::Placement& each :
       {dtensor::replicate(), dtensor::shard(0), dtensor::shard(1),
        dtensor::partial()}) {
    if (dtensor::text(each) == name) return each;
  }
  SB_FAIL("placement ", name, ": give R, S(0), S(1) or P(sum)");
}

/// The blocks of an 8 x 8 tensor on a mesh, before and after each move.
json mesh_answer(JsonObject& question) {
  const Shape global = {8, 8};
  Shape mesh = {2, 2};
  std::vector<std::string> names = {"S(0)", "R", "R", "R"};
  question.whole("rows", 1, 8, mesh[0]);
  question.whole("columns", 1, 8, mesh[1]);
  question.text("from_rows", names[0]);
  question.text("from_columns", names[1]);
  question.text("to_rows", names[2]);
  question.text("to_columns", names[3]);
  question.finish();
  dtensor::Placements now = {placement_of(names[0]), placement_of(names[1])};
  const dtensor::Placements to = {placement_of(names[2]),
                                  placement_of(names[3])};
  std::vector<std::vector<std::int64_t>> ranks;
  for (std::int64_t i = 0; i < mesh[0]; ++i) {
    for (std::int64_t j = 0; j < mesh[1]; ++j) ranks.push_back({i, j});
  }
  const auto layout = [&] {
    json blocks = json::array();
    for (const auto& rank : ranks) {
      const auto [shape, offset] = local_part(global, now, mesh, rank);
      blocks.push_back({offset[0], offset[1], shape[0], shape[1]});
    }
    return json{{"placements", text(now)}, {"blocks", blocks}};
  };
  json layouts = json::array({layout()}), moves = json::array();
  for (const dtensor::Move& move : dtensor::moves_between(now, to)) {
    dtensor::Placements next = now;
    next[move.axis] = move.to;
    json sent = json::array();
    std::string op;
    for (const auto& rank : ranks) {
      const auto calls = calls_of(now, next, global, mesh, rank);
      if (!calls.empty()) op = comm_op_name(calls[0].op);
      sent.push_back(4 * wire_elements(calls, mesh));  // bytes in f32
    }
    moves.push_back({{"axis", move.axis},
                     {"from", text(move.from)},
                     {"to", text(move.to)},
                     {"collective", op},
                     {"sent", sent}});
    now = next;
    layouts.push_back(layout());
  }
  return {{"layouts", layouts}, {"moves", moves}};
}

// -----------------------------------------------------------------------------

json answer_to(const std::string& text) {
  try {
    const json given = json_file::parse_json(text, "question");
    JsonObject question(given, "question", "");
    std::string about = "schedule";
    question.choice("about", {"schedule", "zero", "mask", "mesh"}, about);
    if (about == "zero") return zero_answer(question);
    if (about == "mask") return mask_answer(question);
    if (about == "mesh") return mesh_answer(question);
    return schedule_answer(question);
  } catch (const std::exception& error) {
    return {{"error", error.what()}};
  }
}

}  // namespace
}  // namespace shardbook::explorer

/// The text lives until the next call.
extern "C" const char* shardbook_schedules(const char* question) {
  static std::string text;
  text = shardbook::explorer::answer_to(question).dump(
      -1, ' ', false, nlohmann::json::error_handler_t::replace);
  return text.c_str();
}
