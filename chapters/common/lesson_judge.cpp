#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>

#include "chapters/common/lesson.h"
#include "comm/launch.h"
#include "core/check.h"
#include "core/context.h"
#include "core/how_many.h"

namespace shardbook::lesson {
namespace {

constexpr double kTolerance = 1e-12, kMorePeak = 1.05, kMoreWaits = 1.1;
/// Those that only the judge knows.
constexpr Task kOtherTasks[] = {{24, 8, 32, 16, 4, 1}, {24, 6, 24, 18, 6, 2}};

/// The line by which ./shardbook exercise knows the verdict, or "". It is taken
/// before any of the reader's code runs.
std::string take_word() {
  const char* word = std::getenv("SHARDBOOK_JUDGE");
  const std::string line =
      word == nullptr || *word == 0 ? "" : word + std::string("\n");
  ::unsetenv("SHARDBOOK_JUDGE");
  return line;
}
const std::string word_of_judge = take_word();

/// The largest |a - b| of all weights, relative to the largest weight, and the
/// weight that has it.
std::pair<double, std::string> difference(
    const std::vector<NamedTensor>& weights,
    const std::vector<NamedTensor>& expected) {
  std::map<std::string, Tensor> by_name;
  for (const NamedTensor& each : weights) by_name[each.name] = each.tensor;
  double scale = 0;
  std::pair<double, std::string> largest = {0, ""};
  for (const auto& [name, tensor] : expected) {
    SB_CHECK(by_name.count(name) != 0, "the lesson returns no weight \"", name,
             "\": give all weights of the model, by name, on rank 0");
    const Tensor& ours = by_name[name];
    SB_CHECK(ours.shape() == tensor.shape(), "weight \"", name, "\" is ",
             shape_text(ours.shape()), ", one device has ",
             shape_text(tensor.shape()));
    for (const double value : tensor.to_vector<double>()) {
      scale = std::max(scale, std::abs(value));
    }
    const double apart = max_abs_difference(ours, tensor);
    if (std::isnan(apart)) return {apart, name};
    if (apart > largest.first) largest = {apart, name};
  }
  return {largest.first / scale, largest.second};
}

/// "12 each", or every rank's.
std::string by_rank(const std::vector<double>& values) {
  if (std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) ==
      values.end()) {
    return with_commas(values[0]) + (values.size() > 1 ? " each" : "");
  }
  std::string text;
  for (const double value : values) {
    text += (text.empty() ? "" : ", ") + with_commas(value);
  }
  return text;
}

/// The sends and receives of a rank: when they are issued, and when they have
/// been waited for.
class Calls : public CommObserver {
 public:
  struct Event {
    CommRecord call;
    bool is_wait;
  };
  void on_issue(const CommRecord& call) override { add({call, false}); }
  void on_complete(const CommRecord& call) override { add({call, true}); }
  std::vector<Event> events;

 private:
  void add(const Event& event) {
    const CommOp op = event.call.op;
    if (event.call.group != "world") return;
    if (op == CommOp::kSend || op == CommOp::kRecv) events.push_back(event);
  }
};

/// The longest chain of messages of the world of which none can begin before the
/// one before it has arrived. A message begins when both ends have called, and
/// its rank goes on when it has waited for it.
int longest_chain(const std::vector<std::shared_ptr<Calls>>& calls) {
  // By from and to, and by end: how long the chain was at each call, and how
  // many of the calls have been waited for
  struct End {
    std::vector<int> called;
    std::size_t waited = 0;
  };
  std::map<std::pair<int, int>, std::array<End, 2>> messages;
  std::vector<std::size_t> done(calls.size(), 0);
  std::vector<int> length(calls.size(), 0);
  for (bool moves = true; moves;) {
    moves = false;
    for (std::size_t r = 0; r < calls.size(); ++r) {
      for (; done[r] < calls[r]->events.size(); ++done[r], moves = true) {
        const auto& [call, is_wait] = calls[r]->events[done[r]];
        const int rank = static_cast<int>(r), peer = call.root_or_peer;
        const bool is_send = call.op == CommOp::kSend;
        auto& ends =
            messages[is_send ? std::pair(rank, peer) : std::pair(peer, rank)];
        End& own = ends[is_send];
        if (!is_wait) {
          own.called.push_back(length[r]);
          continue;
        }
        const std::vector<int>& others = ends[!is_send].called;
        if (own.waited == others.size()) break;
        length[r] = std::max(
            {length[r], own.called[own.waited] + 1, others[own.waited] + 1});
        ++own.waited;
      }
    }
  }
  return *std::max_element(length.begin(), length.end());
}

void add_claim(Verdict& verdict, const std::string& name, bool holds,
               const std::string& text) {
  verdict.text +=
      fmt::format("{:8} {:5}  {}\n", name, holds ? "holds" : "FAILS", text);
  if (!holds) verdict.failed += (verdict.failed.empty() ? "" : " ") + name;
}

/// All claims but the one about other sizes.
Verdict judge_task(const Lesson& lesson, int ranks, bool judges_peaks) {
  Verdict verdict;
  std::vector<double> bill;
  for (int r = 0; r < ranks; ++r) bill.push_back(lesson.bill(r, ranks));
  // 1. Every rank ends, although no send is buffered
  std::vector<Result> results(static_cast<std::size_t>(ranks));
  std::vector<std::shared_ptr<Calls>> calls(results.size());
  LaunchOptions launch;
  launch.rendezvous_sends = true;
  try {
    run_ranks(
        ranks,
        [&](ProcessGroup& world) {
          RankContext::current().device.reset_peak_memory();
          const auto r = static_cast<std::size_t>(world.rank());
          world.set_observer(calls[r] = std::make_shared<Calls>());
          results[r] = lesson.train(world);
        },
        launch);
  } catch (const std::exception& error) {
    std::string why = error.what();
    if (why.find("does not receive yet") != std::string::npos) {
      why +=
          "; here, as with large messages, no send ends before it is received";
    }
    add_claim(verdict, "ends", false, why);
    verdict.text += fmt::format(
        "numbers  later  weights and loss must be one device's, to 1e-12\n"
        "bytes    later  the bill is {}\n",
        by_rank(bill));
    return verdict;
  }
  // 2. Weights and loss are those of one device
  RankContext context(Device::cpu(0), /*rank=*/0, /*num_threads=*/1);
  const RankContext::Scope scope(context);
  const ReferenceRun one_device =
      lesson.one_device ? lesson.one_device() : train_one_device(options());
  verdict.loss = results[0].loss;
  verdict.one_device_loss = one_device.losses.back();
  const auto [apart, name] =
      difference(results[0].weights, one_device.parameters);
  const bool same_weights = apart <= kTolerance;
  const bool same_loss = std::abs(verdict.loss - verdict.one_device_loss) <=
                         kTolerance * std::abs(verdict.one_device_loss);
  add_claim(
      verdict, "numbers", same_weights && same_loss,
      fmt::format("loss {:.10f}, {:.10f} on one device; weights differ by "
                  "{:.0e}{}",
                  verdict.loss, verdict.one_device_loss, apart,
                  !same_weights ? ", most in " + name
                  : !same_loss  ? ", but the loss that is returned is wrong"
                                : ""));
  // 3. Every rank sends what the bill says
  std::vector<double> bytes, peaks;
  bool is_as_billed = true;
  for (std::size_t r = 0; r < results.size(); ++r) {
    bytes.push_back(results[r].bytes);
    peaks.push_back(results[r].peak_bytes);
    is_as_billed &= std::abs(bytes[r] - bill[r]) < 0.5;
  }
  add_claim(
      verdict, "bytes", is_as_billed,
      "sent " + by_rank(bytes) +
          (is_as_billed ? ", as billed" : "; the bill is " + by_rank(bill)));
  // 4. No rank keeps more than the lesson's, or waits in a longer chain
  const double peak = *std::max_element(peaks.begin(), peaks.end());
  if (lesson.peak_bytes != 0 && judges_peaks) {
    add_claim(verdict, "memory", peak <= kMorePeak * lesson.peak_bytes,
              peak <= lesson.peak_bytes
                  ? with_commas(lesson.peak_bytes) +
                        " bytes at the peak of a rank, or less"
                  : fmt::format("{} bytes at the peak of a rank; at most {}: "
                                "{} times the lesson's {}",
                                with_commas(peak),
                                with_commas(kMorePeak * lesson.peak_bytes),
                                kMorePeak, with_commas(lesson.peak_bytes)));
  }
  const int chain = longest_chain(calls);
  if (lesson.chain != 0 && judges_peaks) {
    add_claim(
        verdict, "waits", chain <= kMoreWaits * lesson.chain,
        chain <= lesson.chain
            ? fmt::format("for at most {} messages in a row", lesson.chain)
            : fmt::format("for {} messages in a row; at most "
                          "{:.0f}: {} times the lesson's {}",
                          chain, std::floor(kMoreWaits * lesson.chain),
                          kMoreWaits, lesson.chain));
  }
  return verdict;
}

}  // namespace

Verdict judge(const Lesson& lesson, int ranks) {
  if (ranks != 0) return judge_task(lesson, ranks, /*judges_peaks=*/false);
  Verdict verdict = judge_task(lesson, lesson.ranks.front(), true);
  const struct ShowAgain {
    Task task;
    ~ShowAgain() { set_task(task); }
  } at_end = {task()};
  for (const Task& other_task : kOtherTasks) {
    if (!verdict.failed.empty()) break;
    set_task(other_task);
    ranks =
        &other_task == kOtherTasks ? lesson.ranks.front() : lesson.ranks.back();
    const Verdict other = judge_task(lesson, ranks, false);
    if (other.failed.empty()) continue;
    const auto why = other.text.find("FAILS  ") + 7;
    add_claim(
        verdict, "sizes", false,
        fmt::format("on {}, {} samples of {} tokens, seed {}: {}",
                    how_many(ranks, "rank"), batch_size(), sequence(),
                    task().seed,
                    other.text.substr(why, other.text.find('\n', why) - why)));
  }
  if (verdict.failed.empty()) {
    add_claim(verdict, "sizes", true,
              "the same with other models, batches, seeds" +
                  std::string(lesson.ranks.size() > 1 ? " and ranks" : ""));
  }
  return verdict;
}

int compare(const Lesson& lesson) {
  const Verdict verdict = judge(lesson);
  fmt::print("{}{}", word_of_judge, verdict.text);
  return verdict.failed.empty() ? 0 : 1;
}

}  // namespace shardbook::lesson
