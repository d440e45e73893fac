// Options that would make another training of the one that a run continues.

#include "tests/resume/resume_support.h"

namespace shardbook {
namespace {

class OtherOptions : public ResumeTest {
 protected:
  /// A step of a new run, and then the next one, or a refusal.
  Outcome begin(const std::string& chapter, const std::string& options) const {
    std::filesystem::remove_all(checkpoints());
    return train(chapter, options + " --steps 1" + kQuick);
  }
  Outcome go_on(const std::string& chapter, const std::string& options) const {
    return train(chapter, options + " --steps 2 --resume" + kQuick);
  }
  const std::string kQuick = " --cluster none --no-check";
};

TEST_F(OtherOptions, AConfigsScheduleIsNoOptionsSchedule) {
  const std::string plain = R"(--config '{"gradient_clipping": 0}')";
  const std::string rises =
      R"(--config '{"gradient_clipping": 0, "scheduler": {"type": "WarmupLR",
         "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 20}}}')";
  expect_done(begin("15_engine", plain));
  expect_refused(
      go_on("15_engine", rises),
      {"is of another run", "/scheduler/type not set there, WarmupLR",
       "/scheduler/params/warmup_num_steps not set there, 20 here"});
  expect_done(go_on("02_ddp", ""));

  expect_done(begin("15_engine", rises));
  expect_refused(go_on("02_ddp", ""),
                 {"/scheduler/type WarmupLR there, not set here"});
  expect_done(go_on("15_engine", rises));
}

TEST_F(OtherOptions, GatesRouteAsBefore) {
  const std::string two = "--world-size 2 --ep 2 ";
  expect_done(begin("13_moe", two));
  for (const auto& [option, text] :
       std::vector<std::pair<std::string, std::string>>{
           {"--top-k 2", "--top-k 1 there, 2 here"},
           {"--capacity-factor 4", "--capacity-factor 1 there, 4 here"},
           {"--aux-coefficient 3", "there, 3 here"},
           {"--noise jitter", "--noise none there, jitter here"}}) {
    expect_refused(go_on("13_moe", two + option), {text});
  }
  // The engine's keys are the same options
  const std::string config =
      R"(--world-size 2 --config '{"gradient_clipping": 0, "shardbook":
         {"experts": {"num_experts": 8, "ep_size": 2, "top_k": )";
  expect_refused(go_on("15_engine", config + "2}}}'"),
                 {"is of another run: --top-k 1 there, 2 here\n"});
  expect_done(go_on("15_engine", config + "1}}}'"));
}

TEST_F(OtherOptions, StreamsOfDropoutBelongToTheRanks) {
  const std::string streams = "--rng megatron --dropout 0.1 --world-size ";
  expect_done(begin("07_tensor_parallel", streams + "2"));
  expect_refused(go_on("07_tensor_parallel", streams + "4"),
                 {"ranks that draw dropout for themselves 2 there, 4 here"});
  expect_done(go_on("07_tensor_parallel", streams + "2"));
}

}  // namespace
}  // namespace shardbook
