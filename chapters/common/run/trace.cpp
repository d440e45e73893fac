#include "chapters/common/run/trace.h"

#include <fmt/format.h>

#include <chrono>
#include <fstream>

#include "core/check.h"

namespace shardbook {
namespace {

double clock_s() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string comm_name(const CommRecord& record) {
  std::string name = comm_op_name(record.op);
  if (!record.label.empty()) name += " " + record.label;
  return name;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return result;
}

}  // namespace

Trace::Trace(int rank) : rank_(rank), start_s_(clock_s()) {}

double Trace::now_s() const { return clock_s() - start_s_; }

void Trace::begin(TraceEvent event) {
  std::lock_guard<std::mutex> lock(mutex_);
  event.begin_s = now_s();
  events_.push_back(std::move(event));
}

// Ends the latest open event of this name: operations nest. Messages of one
// name end in the order of their issue.
void Trace::end(const std::string& name, const std::string& category) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool is_comm = category == "comm";
  TraceEvent* open = nullptr;
  for (auto it = events_.rbegin(); it != events_.rend(); ++it) {
    if (it->end_s >= 0 || it->name != name || it->category != category) {
      continue;
    }
    open = &*it;
    if (!is_comm) break;
  }
  if (open != nullptr) open->end_s = now_s();
}

void Trace::on_op_begin(const OpEvent& event) {
  begin({event.name, phase_name(event.phase), 0, -1, event.flops, event.bytes});
}

void Trace::on_op_end(const OpEvent& event) {
  end(event.name, phase_name(event.phase));
}

void Trace::on_issue(const CommRecord& record) {
  begin({comm_name(record), "comm", 0, -1, 0, wire_bytes(record)});
}

void Trace::on_complete(const CommRecord& record) {
  end(comm_name(record), "comm");
}

std::vector<TraceEvent> Trace::events() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return events_;
}

std::string Trace::to_json() const {
  std::string text = fmt::format(
      R"({{"name":"process_name","ph":"M","pid":{0},"args":{{"name":"rank {0}"}}}})",
      rank_);
  text += fmt::format(
      R"(,{{"name":"thread_name","ph":"M","pid":{0},"tid":0,"args":{{"name":"compute"}}}})"
      R"(,{{"name":"thread_name","ph":"M","pid":{0},"tid":1,"args":{{"name":"communication"}}}})",
      rank_);
  for (const TraceEvent& event : events()) {
    const double end_s = event.end_s < 0 ? event.begin_s : event.end_s;
    text += fmt::format(
        ",\n"
        R"({{"name":"{}","cat":"{}","ph":"X","pid":{},"tid":{},"ts":{:.3f},)"
        R"("dur":{:.3f},"args":{{"flops":{},"bytes":{}}}}})",
        escaped(event.name), event.category, rank_,
        event.category == "comm" ? 1 : 0, event.begin_s * 1e6,
        (end_s - event.begin_s) * 1e6, event.flops, event.bytes);
  }
  return text;
}

TraceScope::TraceScope(const Options& options, ProcessGroup& world)
    : path_(options.trace),
      world_(world),
      trace_(world.rank()),
      is_watching_(!path_.empty()) {
  if (!is_watching_) return;
  RankContext::current().add_observer(&trace_);
  world_.set_observer(&trace_);
}

TraceScope::~TraceScope() { stop(); }

void TraceScope::stop() {
  if (!is_watching_) return;
  RankContext::current().remove_observer(&trace_);
  world_.set_observer(nullptr);
  is_watching_ = false;
}

void TraceScope::write() {
  if (path_.empty()) return;
  stop();
  const std::vector<std::string> traces = world_.collect(trace_.to_json());
  if (world_.rank() == 0) write_chrome_trace(path_, traces);
}

void write_chrome_trace(const std::string& path,
                        const std::vector<std::string>& json_by_rank) {
  std::ofstream file(path);
  SB_CHECK(file, "--trace ", path, ": cannot be written");
  file << "{\"traceEvents\":[\n";
  for (std::size_t i = 0; i < json_by_rank.size(); ++i) {
    file << (i > 0 ? ",\n" : "") << json_by_rank[i];
  }
  file << "\n]}\n";
  file.close();
  SB_CHECK(file, "--trace ", path, ": could not be written to its end");
}

}  // namespace shardbook
