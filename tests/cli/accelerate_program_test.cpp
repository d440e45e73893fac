// ./shardbook run accelerate: the loop under each plugin, stopped and gone on
// with, and the sentences of what is refused.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cli/programs.h"

namespace shardbook {
namespace {

constexpr const char* kTinyScript =
    R"( --model '{"model_type": "gpt2", "vocab_size": 32, "n_positions": 8,
        "n_embd": 16, "n_layer": 2, "n_head": 2}' --seq 8 --data walk)";

Outcome run_loop(const std::string& options) {
  return run("accelerate", options + kTinyScript);
}

/// The lines that begin with a word: "update", "eval", "numbers".
std::string lines_of(const Outcome& outcome, const std::string& word) {
  std::istringstream text(outcome.text);
  std::string found;
  for (std::string line; std::getline(text, line);) {
    if (line.rfind(word, 0) == 0) found += line + "\n";
  }
  return found;
}

TEST(AccelerateProgram, EveryPluginTrainsAsOneProcess) {
  for (const std::string plugin :
       {"--world-size 4 --plugin ddp", "--world-size 4 --plugin fsdp",
        "--world-size 2 --plugin fsdp --fsdp-version 2",
        "--world-size 2 --plugin fsdp --sharding-strategy SHARD_GRAD_OP "
        "--use-orig-params",
        "--world-size 4 --plugin fsdp --sharding-strategy HYBRID_SHARD "
        "--shard-size 2 --auto-wrap-policy SIZE_BASED_WRAP --min-num-params "
        "1000",
        "--world-size 2 --plugin fsdp --fsdp-backward-prefetch BACKWARD_POST "
        "--fsdp-cpu-offload --activation-checkpointing",
        "--world-size 2 --plugin deepspeed --zero-stage 0",
        "--world-size 4 --plugin deepspeed",
        "--world-size 2 --plugin deepspeed --zero-stage 3 "
        "--offload-optimizer-device cpu --offload-param-device cpu",
        "--world-size 2 --plugin deepspeed --hf-ds-config "
        R"('{"zero_optimization": {"stage": 1}}')",
        "--world-size 2 --plugin megatron --tp-degree 2",
        "--world-size 4 --plugin megatron --pp-degree 2 --num-micro-batches 2",
        "--world-size 4 --plugin megatron --tp-degree 2 --pp-degree 2 "
        "--sequence-parallelism --recompute-activations",
        "--world-size 4 --plugin megatron --tp-degree 2 "
        "--use-distributed-optimizer"}) {
    SCOPED_TRACE(plugin);
    // On 2 replicas a round is not full; on 4 a window is short, too
    expect_done(
        run_loop(plugin + " --gradient-accumulation-steps 2 --batch-size 2 "
                          "--num-samples 23 --num-train-epochs 2 "
                          "--eval-samples 11 --dtype f64"),
        {"equal", "11 samples"});
  }
}

TEST(AccelerateProgram, OptionsOfTheScript) {
  for (const std::string options :
       {"", "--split-batches --batch-size 8", "--drop-last --num-samples 45",
        "--shuffle --num-train-epochs 2", "--max-grad-norm 0",
        "--optimizer sgd --lr 0.1 --weight-decay 0.1",
        "--lr-scheduler-type cosine --num-warmup-steps 4",
        "--lr-scheduler-type constant --optimizer adam",
        "--mixed-precision bf16 --lr 0.0001", "--max-train-steps 2 --seed 4"}) {
    SCOPED_TRACE(options);
    expect_done(run_loop("--world-size 2 " + options), {"equal"});
  }
  // Steps that overflow are left out, which no f32 run does
  expect_done(run_loop("--world-size 2 --mixed-precision fp16"),
              {"numbers     not compared: fp16"});
  // A config has an optimizer, rates, clipping and a dtype of its own
  const std::string config =
      R"("optimizer": {"type": "Adam", "params": {"lr": "auto",
         "weight_decay": 0.1}}, "gradient_clipping": 0.5, "scheduler": {"type":
         "WarmupLR", "params": {"warmup_num_steps": 3}})";
  expect_done(run_loop("--plugin deepspeed --world-size 2 --lr 0.002 "
                       "--split-batches --hf-ds-config '{" +
                       config + "}'"),
              {"rate 0\n", "rate 0.002\n", "equal"});
  expect_done(run_loop("--plugin deepspeed --hf-ds-config '{" + config +
                       R"(, "bf16": {"enabled": true}}')"),
              {"(allowed 0.05): equal"});
  if (!SHARDBOOK_HAVE_GLOO) GTEST_SKIP() << "built without Gloo";
  // The bits of Gloo's sums may differ, and with them the largest difference
  const Outcome threads = run_loop("--world-size 2");
  const Outcome gloo = run_loop("--world-size 2 --backend gloo");
  expect_done(gloo, {"equal"});
  EXPECT_EQ(lines_of(gloo, "update"), lines_of(threads, "update"));
  EXPECT_EQ(lines_of(gloo, "eval"), lines_of(threads, "eval"));
}

TEST(AccelerateProgram, GoesOnWhereItStoppedUnderAnotherPlugin) {
  const std::string common =
      "--world-size 2 --num-train-epochs 2 --num-samples 20 --batch-size 2 "
      "--gradient-accumulation-steps 3 --dtype f64 ";
  const std::string states = folder() / "accelerate";
  const Outcome whole =
      run_loop(common + "--checkpointing-steps 3 --output-dir " + states);
  expect_done(whole, {"equal"});
  EXPECT_EQ(count(lines_of(whole, "update"), "\n"), 4);
  for (const std::string plugin : {"ddp", "fsdp", "deepspeed", "megatron"}) {
    const Outcome rest =
        run_loop(common + "--plugin " + plugin + " --resume-from-checkpoint " +
                 states + "/step_3");
    expect_done(rest, {"equal"});
    EXPECT_EQ(count(lines_of(rest, "update"), "\n"), 1) << rest.text;
    expect_text(whole.text,
                {lines_of(rest, "update") + lines_of(rest, "eval")});
  }
  for (const auto& [option, text] :
       {std::pair{"--lr 0.5", "--lr 0.001 there, 0.5 here"},
        std::pair{"--batch-size 1", "samples of an update 12 there, 6 here"},
        std::pair{"--shuffle", "--shuffle false there, true here"}}) {
    expect_end(run_loop(common + option + " --resume-from-checkpoint " +
                        states + "/step_3"),
               2, {states + "/step_3 is of another run: ", text});
  }
}

TEST(AccelerateProgram, ThePageExplainsEveryOption) {
  std::ifstream file(SHARDBOOK_ROOT "/chapters/15_engine/accelerate.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  std::istringstream help(run("accelerate", "--help").text);
  int options = 0;
  for (std::string word; help >> word;) {
    if (word.rfind("--", 0) != 0 || word == "--help") continue;
    const std::string name = word.substr(
        2, word.find_first_not_of("abcdefghijklmnopqrstuvwxyz-", 2) - 2);
    EXPECT_TRUE(has_text(page, "--" + name) || has_text(page, "--no-" + name))
        << "the page does not mention --" << name;
    options += 1;
  }
  EXPECT_GT(options, 40);
}

// AcceleratorErrors has what the library refuses.
TEST(AccelerateProgram, RefusesByName) {
  for (const auto& [options, sentence] :
       std::vector<std::pair<std::string, std::string>>{
           {"--plugin horovod", "--plugin horovod: give one of ddp"},
           {"--zero-stage 2",
            "--zero-stage: a field of --plugin deepspeed, and --plugin is ddp"},
           {"--plugin deepspeed --tp-degree 2",
            "--tp-degree: a field of --plugin megatron"},
           {"--backend sim", "--backend sim"},
           {"--plugin fsdp --sharding-strategy FULL",
            "FullyShardedDataParallelPlugin: sharding_strategy FULL: give "
            "one "},
           {R"(--plugin deepspeed --hf-ds-config '{"gradient_clipping": 3}')"
            " --max-grad-norm 1",
            "/gradient_clipping 3, but DeepSpeedPlugin's gradient_clipping"},
           {R"(--plugin deepspeed --hf-ds-config )"
            R"('{"optimizer": {"type": "SGD"}}' --optimizer adamw)",
            "--optimizer: hf_ds_config has /optimizer/type SGD; leave"},
           {"--drop-last --num-samples 5", "drop_last leaves no batch of 5"},
           {"--output-dir x", "--checkpointing-steps 0, --output-dir \"x\": "},
           {"--max-train-steps 99",
            "--max-train-steps 99: --num-train-epochs 1 has 6 updates"},
           {"--resume-from-checkpoint /nowhere/x", "/nowhere/x"}}) {
    SCOPED_TRACE(options);
    const Outcome outcome = run_loop("--world-size 2 " + options);
    expect_sentence(outcome, "error: ");
    expect_text(outcome.text, {sentence});
  }
}

}  // namespace
}  // namespace shardbook
