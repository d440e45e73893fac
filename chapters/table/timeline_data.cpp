// The timeline of a run as report.html carries it: columns of differences as
// JSON, deflated, in base64. The differences repeat from layer to layer and from
// one micro-batch to the next, so little is left of them.

#include <zlib.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "chapters/table/internal/page.h"
#include "core/check.h"

namespace shardbook::table::internal {
namespace {

using Json = nlohmann::ordered_json;
using Numbers = std::vector<std::int64_t>;

std::int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

Numbers differences(Numbers values) {
  for (std::size_t i = values.size(); i-- > 1;) values[i] -= values[i - 1];
  return values;
}

// Names, labels and categories of events, each once.
class Operations {
 public:
  std::size_t number_of(const sim::TimelineEvent& event) {
    const auto [op, added] = numbers_.try_emplace(
        std::make_tuple(event.name, event.label, event.category), list_.size());
    if (added) list_.push_back({event.name, event.label, event.category});
    return op->second;
  }
  const Json& list() const { return list_; }

 private:
  std::map<std::tuple<std::string, std::string, std::string>, std::size_t>
      numbers_;
  Json list_ = Json::array();
};

// A column whose values are all `usual` is left out.
template <typename Number>
void add_column(Json& queue, const char* name,
                const std::vector<Number>& column, Number usual) {
  for (const Number& value : column) {
    if (value == usual) continue;
    queue[name] = column;
    return;
  }
}

Json queue_json(const sim::RankTimeline& timeline, const std::string& name,
                Operations& operations) {
  std::vector<std::size_t> op;
  Numbers gap, length, peer, message;
  std::vector<double> sent, flops;
  std::int64_t last_end = 0;
  for (const sim::TimelineEvent& event : timeline.events) {
    if (event.queue != name) continue;
    const std::int64_t begin = nanoseconds(event.begin_s);
    const std::int64_t end = nanoseconds(event.end_s);
    op.push_back(operations.number_of(event));
    gap.push_back(begin - last_end);
    length.push_back(end - begin);
    sent.push_back(event.bytes);
    flops.push_back(event.flops);
    peer.push_back(event.peer);
    message.push_back(event.message);
    last_end = end;
  }
  Json queue = {{"name", name}, {"op", op}, {"gap", gap}, {"length", length}};
  add_column(queue, "sent", sent, 0.0);
  add_column(queue, "flops", flops, 0.0);
  add_column(queue, "peer", peer, std::int64_t{-1});
  add_column(queue, "message", message, std::int64_t{-1});
  return queue;
}

// Times, and the bytes of each kind.
Json memory_json(const sim::RankTimeline& timeline) {
  Json columns = Json::array();
  Numbers times;
  for (const sim::MemorySample& sample : timeline.memory) {
    times.push_back(nanoseconds(sample.time_s));
  }
  columns.push_back(differences(std::move(times)));
  for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
    Numbers bytes;
    for (const sim::MemorySample& sample : timeline.memory) {
      bytes.push_back(sample.bytes[k]);
    }
    columns.push_back(differences(std::move(bytes)));
  }
  return columns;
}

std::string deflated(const std::string& text) {
  uLongf size = compressBound(text.size());
  std::string bytes(size, '\0');
  SB_CHECK(compress(reinterpret_cast<Bytef*>(bytes.data()), &size,
                    reinterpret_cast<const Bytef*>(text.data()),
                    text.size()) == Z_OK,
           "report.html: zlib cannot compress a timeline");
  bytes.resize(size);
  return bytes;
}

}  // namespace

std::string timeline_data(const sim::StepView& view) {
  Operations operations;
  Json groups = Json::array(), kinds = Json::array();
  for (const sim::RankGroup& group : view.groups) {
    Json queues = Json::array();
    for (const std::string& name : sim::queue_names(group.timeline)) {
      queues.push_back(queue_json(group.timeline, name, operations));
    }
    groups.push_back({{"rank", group.ranks.front()},
                      {"queues", std::move(queues)},
                      {"memory", memory_json(group.timeline)}});
  }
  for (std::size_t k = 0; k < kNumMemoryKinds; ++k) {
    kinds.push_back(memory_kind_name(static_cast<MemoryKind>(k)));
  }
  const Json data = {{"length", nanoseconds(view.step_s)},
                     {"ops", operations.list()},
                     {"kinds", std::move(kinds)},
                     {"groups", std::move(groups)}};
  return pictures::svg::base64(deflated(data.dump()));
}

}  // namespace shardbook::table::internal
