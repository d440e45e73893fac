// Lessons equal one device and their chapters' programs; every exercise says what
// is missing; every mistake is caught by the claims that its text names.

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "chapters/01_data_parallel/lesson.cpp"
#include "chapters/04_model_parallel/lesson.cpp"
#include "tests/lessons/variants.h"

namespace shardbook::lessons_test {

std::vector<Variant>& variants() {
  static std::vector<Variant> all;
  return all;
}

Variant::Variant(std::string chapter, std::string name, std::string claims,
                 std::function<lesson::Lesson()> lesson)
    : chapter(std::move(chapter)),
      name(std::move(name)),
      claims(std::move(claims)),
      lesson(std::move(lesson)) {
  variants().push_back(*this);
}

namespace {

std::vector<Variant> lessons() {
  std::vector<Variant> found;
  for (const Variant& each : variants()) {
    if (each.name.empty()) found.push_back(each);
  }
  return found;
}

// --- One device -----------------------------------------------------------------

void expect_claims_hold(const lesson::Lesson& lesson, int ranks,
                        const std::string& what) {
  const lesson::Verdict verdict = judge(lesson, ranks);
  EXPECT_EQ(verdict.failed, "") << what << "\n" << verdict.text;
  EXPECT_NEAR(verdict.loss, verdict.one_device_loss, 1e-12) << what;
}

TEST(Lessons, HoldTheirClaimsOnAllSizes) {
  const std::map<std::string, std::vector<int>> sizes = {
      {"00_single_device", {1}},
      {"01_data_parallel", {1}},
      {"04_model_parallel", {1}},
      {"08_tensor_parallel_2d", {1, 4}},
      {"09_tensor_parallel_2p5d", {1, 4, 8}},
      {"10_tensor_parallel_3d", {1, 8}},
      {"14_hybrid_3d", {1, 8}}};
  for (const Variant& each : lessons()) {
    const auto own = sizes.find(each.chapter);
    for (const int ranks :
         own != sizes.end() ? own->second : std::vector<int>{1, 2, 3, 4}) {
      expect_claims_hold(each.lesson(), ranks,
                         each.chapter + " on " + std::to_string(ranks));
    }
  }
  EXPECT_EQ(lessons().size(), 16u);
}

TEST(Lessons, HoldTheirClaimsOnDevicesOfOneProcess) {
  for (const int devices : {1, 2, 3}) {
    expect_claims_hold(data_parallel::this_lesson(devices), 1,
                       std::to_string(devices) + " devices");
  }
  for (const int splits : {1, 2, 4}) {
    expect_claims_hold(model_parallel::this_lesson(splits), 1,
                       std::to_string(splits) + " splits");
  }
}

// --- The chapters' programs -----------------------------------------------------

double last_loss_of(const std::string& chapter, const std::string& options) {
  const std::string command =
      std::string(SHARDBOOK_BUILD "/chapters/") + chapter + "/ch" + chapter +
      " --data walk --dtype f64 --optimizer sgd --lr 0.1 --steps 10 --batch 12"
      " --seq 12 --no-check --cluster none --format json --model '" +
      (chapter == "04_model_parallel" || chapter == "11_dtensor"
           ? lesson::mlp()
           : lesson::gpt()) +
      "' " + options;
  std::FILE* program = popen(command.c_str(), "r");
  std::string text;
  for (int c; (c = std::fgetc(program)) != EOF;) text += static_cast<char>(c);
  EXPECT_EQ(pclose(program), 0) << command;
  const auto json = nlohmann::json::parse(text, nullptr, false);
  return json.is_discarded() ? -1 : json["loss"]["last"].get<double>();
}

// The programs of 07 to 10 train GPTs alone, and their lessons the mlp.
TEST(Lessons, TrainAsTheProgramsOfTheirChapters) {
  const std::map<std::string, std::string> options = {
      {"00_single_device", "--micro-batches 3"},
      {"01_data_parallel", "--world-size 4"},
      {"02_ddp", "--world-size 4"},
      {"03_zero_fsdp", "--world-size 4 --strategy zero3"},
      {"04_model_parallel", "--variant pipeline --split-size 4"},
      {"05_gpipe", "--world-size 3 --micro-batches 6"},
      {"06_1f1b", "--world-size 3 --micro-batches 6"},
      {"11_dtensor", "--world-size 4"},
      {"12_sequence_parallel", "--world-size 4"},
      {"13_moe",
       "--world-size 4 --num-experts 12 --dropless --aux-coefficient 0"},
      {"14_hybrid_3d", "--world-size 8 --dp 2 --pp 2 --tp 2 --micro-batches 6"},
      {"15_engine",
       "--world-size 4 --config '{\"gradient_clipping\": 0, "
       "\"zero_optimization\": {\"stage\": 2}}'"}};
  for (const Variant& each : lessons()) {
    const auto own = options.find(each.chapter);
    if (own == options.end()) continue;
    EXPECT_NEAR(last_loss_of(each.chapter, own->second),
                judge(each.lesson()).loss, 1e-12)
        << each.chapter;
  }
}

// --- The judge ---------------------------------------------------------------

TEST(Judge, TrainsOnSizesAndSeedsThatAreNotShown) {
  std::set<std::vector<std::int64_t>> tasks;
  for (const Variant& each : lessons()) {
    if (each.chapter != "02_ddp") continue;
    lesson::Lesson lesson = each.lesson();
    lesson.train = [&, train = lesson.train](ProcessGroup& world) {
      const ModelConfig config = lesson::config();
      if (world.rank() == 0) {
        tasks.insert({world.size(), lesson::batch_size(), lesson::sequence(),
                      config.n_embd, config.n_head, config.vocab_size,
                      static_cast<std::int64_t>(lesson::init().seed)});
      }
      return train(world);
    };
    const lesson::Verdict verdict = judge(lesson);
    EXPECT_EQ(verdict.failed, "") << verdict.text;
    EXPECT_NE(verdict.text.find("\nsizes    holds"), std::string::npos);
  }
  EXPECT_EQ(tasks, (decltype(tasks){{4, 12, 12, 24, 12, 48, 0},
                                    {4, 24, 8, 16, 4, 32, 1},
                                    {2, 24, 6, 18, 6, 24, 2}}));
  EXPECT_EQ(lesson::batch_size(), 12);
}

TEST(Judge, ComparesTheLossAsWellAsTheWeights) {
  for (const Variant& each : lessons()) {
    lesson::Lesson lesson = each.lesson();
    lesson.train = [train = lesson.train](ProcessGroup& world) {
      lesson::Result result = train(world);
      result.loss *= 1 + 1e-11;
      return result;
    };
    const lesson::Verdict verdict = judge(lesson);
    EXPECT_EQ(verdict.failed, "numbers") << each.chapter;
    EXPECT_NE(verdict.text.find("but the loss that is returned is wrong"),
              std::string::npos)
        << verdict.text;
  }
}

TEST(Judge, SaysThatASendWaitsForItsReceiver) {
  for (const Variant& each : variants()) {
    if (each.claims != "ends" || each.name != "waited-for-each-send") continue;
    EXPECT_NE(judge(each.lesson())
                  .text.find("rank 1 waits for rank 2 in send f64[576] to rank "
                             "2 over 'world', which rank 2 does not receive "
                             "yet; rank 2 waits for rank 1 in send"),
              std::string::npos);
    return;
  }
  FAIL() << "no such mistake";
}

// --- Exercises and mistakes -----------------------------------------------------

TEST(Exercises, SayWhatIsMissingAndWhatIsJudged) {
  int num_exercises = 0;
  for (const Variant& each : variants()) {
    if (each.name != "exercise") continue;
    ++num_exercises;
    const lesson::Verdict verdict = judge(each.lesson());
    EXPECT_EQ(verdict.failed, "ends") << each.chapter;
    for (const char* words :
         {" is empty: write it", "\nnumbers ", "\nbytes "}) {
      EXPECT_NE(verdict.text.find(words), std::string::npos)
          << each.chapter << ": " << verdict.text;
    }
  }
  EXPECT_EQ(num_exercises, 16);
}

TEST(Mistakes, AreCaughtByTheClaimsThatTheyName) {
  std::map<std::string, int> count;
  for (const Variant& each : variants()) {
    if (each.name.empty() || each.name == "exercise") continue;
    ++count[each.chapter];
    const lesson::Verdict verdict = judge(each.lesson());
    EXPECT_EQ(verdict.failed, each.claims)
        << each.chapter << ", " << each.name << "\n"
        << verdict.text;
  }
  EXPECT_EQ(count.size(), 16u);
  for (const auto& [chapter, number] : count) EXPECT_GE(number, 3) << chapter;
}

}  // namespace
}  // namespace shardbook::lessons_test
