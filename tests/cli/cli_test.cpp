// Bad input is one clear sentence and exit status 2; nothing is half-written.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>

#include "tests/cli/programs.h"
#include "tests/support/errors.h"

namespace shardbook {
namespace {

/// "00_single_device" and so on.
std::vector<std::string> all_chapters() {
  std::vector<std::string> chapters;
  for (const auto& entry :
       std::filesystem::directory_iterator(SHARDBOOK_ROOT "/chapters")) {
    const std::string name = entry.path().filename().string();
    if (std::isdigit(name[0]) != 0) chapters.push_back(name);
  }
  return chapters;
}

std::string file_text(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string write_file(const std::string& name, const std::string& bytes) {
  const std::string path = folder() / name;
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

TEST(CommandLine, OptionsThatAreUnknownOrImpossible) {
  for (const BadInput& bad : std::initializer_list<BadInput>{
           {"00_single_device", "--nope", "unknown option --nope"},
           {"00_single_device", "--steps -3", "--steps -3: out of range"},
           {"00_single_device", "--steps", "--steps"},
           {"00_single_device", "--lr fast", "--lr fast: not a number"},
           {"00_single_device", "--dtype f8", "--dtype f8: give one of"},
           {"00_single_device", "--model foo", "--model foo: give one of"},
           {"00_single_device", "--seq 100000", "has 256 positions"},
           {"00_single_device", "--world-size 2", "this chapter has one"},
           {"00_single_device", "--micro-batches 25", "give 1 to 24"},
           {"00_single_device", "--master-weights", "needs --dtype bf16"},
           {"00_single_device", "--cuda-graphs", "only with --device cuda"},
           {"00_single_device", "--device-memory lots", "give bytes"},
           {"00_single_device", "--nesterov", "needs --optimizer sgd"},
           {"00_single_device", "--save ''", "--save '': give a value"},
           {"01_data_parallel", "--backend gloo",
            "--backend gloo: give one of threads, sim; DataParallel is one "
            "process"},
           {"02_ddp", "--world-size 0", "--world-size 0: out of range"},
           {"02_ddp", "--world-size 5", "does not divide"},
           {"02_ddp", "--backend nccl", "it moves tensors of GPUs only"},
           {"02_ddp", "--device cuda --backend gloo",
            "tensors of the CPU only"},
           {"02_ddp", "--device cuda --backend sim", "has shapes and no"},
           {"02_ddp", "--device tpu", "--device tpu: give one of cpu, cuda"},
           {"01_data_parallel", "--backend nccl --device cuda",
            "--backend nccl: give one of threads, sim"},
           {"00_single_device", "--tf32", "--tf32: only with --device cuda"},
           {"06_1f1b", "--rendezvous-sends --backend gloo",
            "--rendezvous-sends: --backend gloo decides"},
           {"06_1f1b", "--rendezvous-sends --backend sim",
            "--rendezvous-sends: --backend sim moves no"},
           {"06_1f1b", "--schedule 2f2b", "--schedule 2f2b: give one of"},
           {"06_1f1b", "--schedule no.json", "no.json"},
           {"06_1f1b", "--world-size 3 --schedule dualpipe", "--schedule dual"},
           {"06_1f1b", "--schedule pipedream --clip 1", "--clip 1"},
           {"05_gpipe", "--world-size 7", "give at most one stage per layer"},
           {"05_gpipe", "--partition 1,2", "2 stages; there are 1"},
           {"05_gpipe", "--recompute some", "--recompute some: give one of"},
           {"02_ddp", "--accumulate 2", "called --micro-batches"},
           {"03_zero_fsdp", "--accumulate 2", "called --micro-batches"},
           {"13_moe", "--load-svg load.svg", "report.html"},
           {"03_zero_fsdp", "--strategy zero3 --sharding-strategy no_shard",
            "means nothing to --strategy zero3"},
           {"03_zero_fsdp", "--min-num-params 9", "it belongs to size"},
           {"05_gpipe", "--balance 1,2", "called --partition"},
           {"06_1f1b", "--schedule naive --recompute", "--schedule naive has"},
           {"04_model_parallel", "--micro-batches 2", "give --split-size"},
           {"05_gpipe", "--micro-batches 25", "give 1 to 24"},
           {"05_gpipe", "--long-skips --model mlp", "--long-skips: the layers"},
           {"05_gpipe", "--long-skips --save x.safetensors",
            "--long-skips: a saved model does not record them"},
           {"08_tensor_parallel_2d", "--world-size 6", "give 4 or 9"},
           {"09_tensor_parallel_2p5d", "--world-size 8 --depth 3",
            "give 3 or 12"},
           {"11_dtensor", "--mesh 2x3 --world-size 4", "a product of 4"},
           {"11_dtensor", "--model resnet18", "--model resnet18: this"},
           {"12_sequence_parallel", "--world-size 4 --seq 63", "--seq 63: 4"},
           {"12_sequence_parallel", "--kind ulysses --layout zigzag",
            "give it with --kind ring"},
           {"12_sequence_parallel", "--kind megatron --layout striped",
            "give it with --kind ring"},
           {"12_sequence_parallel", "--kind ulysses --rsa-all-reduce",
            "give it with --kind rsa"},
           {"12_sequence_parallel", "--recompute-attention",
            "give it with --kind megatron"},
           {"12_sequence_parallel", "--kind megatron --world-size 3",
            "--world-size 3: the ranks share 4 heads"},
           {"13_moe", "--world-size 4 --ep 3", "--ep 3: the 4 data-parallel"},
           {"13_moe", "--zero-stage 3", "--zero-stage 3: experts"},
           {"13_moe", "--cpu-offload", "give --zero-stage 2"},
           {"13_moe", "--expert-tp", "give --tp"},
           {"13_moe", "--top-k 9", "--top-k 9: a token chooses among 8"},
           {"13_moe", "--num-experts 4,x", "--num-experts 4,x"},
           {"13_moe", "--num-experts 99999999",
            "--num-experts 99999999: give 1 to 1048576"},
           {"13_moe", "--num-experts 1", "--num-experts 1: no layer has"},
           {"13_moe", "--num-experts 1,2,4,8,8,8,8",
            "--num-experts: 7 numbers, and gpt-nano has 4 layers"},
           {"13_moe", "--noise rsample --top-k 2", "--noise rsample"},
           {"14_hybrid_3d", "--world-size 4 --tp 3", "give a multiple of 3"},
           {"14_hybrid_3d", "--world-size 2 --pp 2 --zero-stage 2",
            "give --zero-stage 1"},
           {"14_hybrid_3d", "--world-size 2 --pp 2 --schedule pipedream",
            "--schedule pipedream: each stage updates by itself"},
           {"14_hybrid_3d", "--order tp-pp", "--order tp-pp: give"},
           {"14_hybrid_3d", "--tp 65536 --cp 65536",
            "make replicas of 4294967296 ranks"},
           {"14_hybrid_3d", "--dp 65536 --tp 65536 --pp 65536",
            "make replicas of 4294967296 ranks"},
           {"14_hybrid_3d", "--num-experts 2147483647",
            "--num-experts 2147483647: out of range"},
           {"15_engine", "--config /", "--config /: cannot be read"},
           {"15_engine", "--config none.json", "none.json: cannot be read"},
           {"15_engine", "--config '{\"train_batchsize\": 8}'",
            "--config: /train_batchsize: unknown key; did you mean"},
           {"15_engine", "--config '{\"train_batch_size\": 8}' --batch 12",
            "--batch 12: --config has /train_batch_size 8; leave one"},
           {"15_engine", "--config '{\"train_batch_size\": 9}' --world-size 2",
            "train_batch_size 9 is not a multiple of data-parallel ranks 2; "
            "give a multiple of 2"},
           {"15_engine", "--micro-batches 2", "gradient_accumulation_steps"}}) {
    expect_refused(bad);
  }
}

// Every chapter names what this machine lacks, before it trains.
TEST(CommandLine, WithoutAGpuTheReasonIsOneSentence) {
  if (run_program("bench/gpu/gpus", "--why").status == 0) {
    GTEST_SKIP() << "a GPU is visible here";
  }
  for (const std::string& chapter : all_chapters()) {
    expect_refused({chapter.c_str(), "--device cuda --steps 1000000000",
                    "error: --device cuda: "});
  }
}

TEST(CommandLine, FilesThatLie) {
  const std::string missing = folder() / "there/is/none";
  expect_refused({"00_single_device", "--load " + missing, "no such"});
  expect_refused({"00_single_device", "--data " + missing, "cannot be read"});
  expect_refused({"00_single_device", "--data /", "--data /"});
  expect_refused({"00_single_device", "--save " + missing + " --steps 0",
                  "cannot create a file"});
  // Found before the training, which would take long
  for (const char* option : {"--log ", "--trace ", "--logits ", "--save ",
                             "--timeline ", "--report "}) {
    expect_refused({"00_single_device",
                    std::string("--steps 1000000000 ") + option + missing,
                    "cannot create a file in"});
  }
  expect_refused({"00_single_device", "--steps 1000000000 --save /dev/null",
                  "is not an ordinary file"});
  expect_refused({"00_single_device", "--data " + write_file("empty.txt", ""),
                  "is empty"});
  expect_refused({"00_single_device",
                  "--data " + write_file("short.txt", "abc"), "too few"});
  expect_refused(
      {"00_single_device",
       "--data " + write_file("latin.txt", "caf\xe9" + std::string(99, ' ')),
       "byte 3 is not UTF-8"});
  expect_refused({"00_single_device",
                  "--load " + write_file("cut.safetensors", "abc"), "cut"});
  expect_refused({"00_single_device",
                  "--load " + write_file("lie.safetensors",
                                         "\xff\xff\xff\xff\xff\xff\xff\x7f{}"),
                  "header length"});
  expect_refused({"00_single_device",
                  "--model " + write_file("bad.json", "{\"n_embd\": -1}"),
                  "\"n_embd\" is -1"});
  expect_refused({"00_single_device",
                  "--model " + write_file("big.json", "{\"n_embd\": 1e309}"),
                  "a number is too large"});
}

TEST(CommandLine, AReportNamesTheTokenIdsOfAFile) {
  const std::string file = write_file("train.bin", "abcdefgh");
  const std::string tiny =
      "--steps 0 --seq 2 --no-check --cluster none --data " + file;
  expect_text(
      run("00_single_device",
          tiny + " --data-format u16 --model '{\"n_embd\": 8, \"n_head\": 1, "
                 "\"n_layer\": 1, \"vocab_size\": 65536}'")
          .text,
      {"data     4 token ids (u16)\n"});
  EXPECT_EQ(run("00_single_device", tiny).text.find("data "),
            std::string::npos);
}

TEST(CommandLine, AModelOfAnotherShapeIsRefused) {
  const std::string path = folder() / "nano.safetensors";
  expect_done(run("00_single_device", "--steps 0 --no-check --save " + path));
  expect_refused({"00_single_device", "--model gpt-micro --load " + path,
                  "the model needs"});
}

TEST(CommandLine, AModelThatComputesSomethingElseIsRefused) {
  const std::string path = folder() / "exact.safetensors";
  const std::string tiny = R"(--steps 1 --seq 8 --batch 2 --model '{"n_embd":)";
  const std::string exact = tiny + R"(16, "activation_function": "gelu"}' )";
  expect_done(run("00_single_device", exact + "--save " + path));
  expect_done(run("00_single_device", exact + "--load " + path));
  expect_refused({"00_single_device", tiny + "16}' --load " + path,
                  "\"activation_function\" is gelu in its config"});
}

// The one device reads the file of --load when the run has ended.
TEST(CommandLine, ARunThatIsComparedReplacesNoFileThatItLoaded) {
  const std::string path = folder() / "both.safetensors";
  const std::string tiny = "--steps 1 --seq 8 --batch 2 --save " + path;
  expect_done(run("00_single_device", tiny));
  expect_refused({"00_single_device", tiny + " --load " + path,
                  "the file of --load, which the run on one device reads"});
  expect_done(run("00_single_device", tiny + " --no-check --load " + path));
}

// A whole model beside each device's part would count as parameters.
TEST(CommandLine, TwoDevicesLoadTheirPartsAlone) {
  const std::string path = folder() / "parts.safetensors";
  const std::string tiny = "--model mlp --steps 1 --seq 8 --batch 2 ";
  expect_done(run("04_model_parallel", tiny + "--save " + path));
  for (const char* variant : {"single", "model_parallel", "pipeline"}) {
    expect_done(run("04_model_parallel",
                    tiny + "--variant " + variant + " --load " + path));
  }
}

// Values are written for messages by calls for each level.
TEST(CommandLine, DeepFilesAreASentence) {
  const std::string deep = "{\"n_embd\": " + std::string(250000, '[') +
                           std::string(250000, ']') + "}";
  const std::string path = write_file("deep.json", deep);
  for (const char* start :
       {"chapters/00_single_device/ch00_single_device --model ",
        "chapters/06_1f1b/ch06_1f1b --schedule ",
        "chapters/15_engine/ch15_engine --config ",
        "chapters/planner/shardbook_plan --nodes 1 --batch 8 "
        "--model "}) {
    const std::string command = start;
    const std::size_t space = command.find(' ');
    expect_end(
        run_program(command.substr(0, space), command.substr(space + 1) + path),
        2, {"nested more than 64 deep; give at most 64"});
  }
}

// A run without steps has no run on shapes before it that would notice.
TEST(CommandLine, RanksDoNotStartForABatchThatCannotBeCut) {
  if (!SHARDBOOK_HAVE_GLOO) GTEST_SKIP() << "built without Gloo";
  for (const char* chapter : {"07_tensor_parallel", "12_sequence_parallel"}) {
    const Outcome outcome = run(chapter,
                                "--backend gloo --world-size 2 --batch 4 "
                                "--micro-batches 5 --steps 0");
    EXPECT_EQ(outcome.status, 2) << outcome.text;
    EXPECT_EQ(
        outcome.text,
        "error: --micro-batches 5: give 1 to 4, the samples of a batch\n");
  }
}

// An update finds sums in f32, twice as large as the gradients in bf16. Without a
// step there is no time to speak of.
TEST(CommandLine, SumsInF32AreInTheBillOfMemory) {
  const auto row_of = [](const std::string& more) {
    const Outcome outcome = run(
        "14_hybrid_3d",
        "--model gpt-nano --batch 8 --seq 8 --world-size 2 --pp 2 --dtype bf16 "
        "--accumulate-f32 " +
            more);
    EXPECT_EQ(outcome.status, 0) << outcome.text;
    const std::size_t line = outcome.text.find("  gradients ");
    return line == std::string::npos
               ? outcome.text
               : outcome.text.substr(line,
                                     outcome.text.find('\n', line) - line);
  };
  const std::string gradients = row_of("--steps 2");
  expect_text(gradients, {"518.5 KiB  equal"});
  const std::string no_step = row_of("--steps 0");
  EXPECT_EQ(no_step.find("virtual"), std::string::npos) << no_step;
}

// A learning rate that no weight survives.
constexpr const char* kDiverging =
    "--steps 8 --seq 8 --batch 8 --optimizer sgd --lr 1e30 --data random ";

TEST(CommandLine, NumbersThatAreNotFiniteAreNamedWhereTheyBegin) {
  const Outcome one = run("00_single_device", kDiverging);
  expect_end(one, 1, {"numbers  the loss is nan from step "});
  EXPECT_EQ(one.text.find("DIFFERENT"), std::string::npos) << one.text;
  // The last stage of a pipeline computes the loss.
  expect_end(run("05_gpipe", std::string("--world-size 2 ") + kDiverging), 1,
             {"first on rank 1: nothing to compare"});
  // No loss follows the last update.
  expect_end(run("02_ddp",
                 "--world-size 2 --model gpt-nano --seq 8 --batch 8 "
                 "--steps 1 --optimizer sgd --dtype f16 --lr 1e30"),
             1,
             {"is not finite after the last step: nothing to "
              "compare"});
}

TEST(CommandLine, WeightsThatAreNotFiniteReplaceNoFileUnasked) {
  const std::string path = write_file("good.safetensors", "good");
  const std::string options = kDiverging + std::string("--save ") + path;
  const Outcome refused = run("00_single_device", options);
  EXPECT_EQ(refused.status, 3);
  expect_text(refused.text,
              {"the loss is nan from step ", "the file is as it was before"});
  EXPECT_EQ(std::filesystem::file_size(path), 4u);
  EXPECT_EQ(run("00_single_device", options + " --save-non-finite").status, 1);
  EXPECT_GT(std::filesystem::file_size(path), 1000u);
}

TEST(CommandLine, MemoryThatCannotDoIsASentence) {
  expect_sentence(run("02_ddp", "--world-size 2 --device-memory 100000"),
                  "error: --device-memory 100000: out of memory on device ");
}

TEST(CommandLine, HelpSaysWhatOptionsTakeAndWhatStatusesMean) {
  expect_text(run("02_ddp", "--help-all").text,
              {"--lr NUMBER", "--steps INTEGER", "--device-memory BYTES",
               "--save keeps the weights only", "2, the", "130 after Ctrl-C"});
  const std::string zero = run("03_zero_fsdp", "--help").text;
  EXPECT_EQ(zero.find("--no-no-sync"), std::string::npos);
  EXPECT_EQ(run("01_data_parallel", "--help").text.find("gloo,"),
            std::string::npos);
  expect_text(run("06_1f1b", "--help").text,
              {"zb-auto", "--memory-limit NUMBER", "--write-schedule"});
}

// The chapter's own options, and the most used of those that all chapters have.
TEST(CommandLine, HelpIsShortAndHelpAllIsComplete) {
  for (const std::string& chapter : all_chapters()) {
    SCOPED_TRACE(chapter);
    const auto [status, help] = run(chapter, "--help");
    EXPECT_EQ(status, 0);
    EXPECT_LE(count(help, "\n  -"), 45);
    expect_text(help, {"--help-all", "--world-size"});
    EXPECT_EQ(count(help, "--weight-decay"), 0);
    expect_text(run(chapter, "--help-all").text, {"--weight-decay"});
  }
}

TEST(CommandLine, APageExplainsEveryOption) {
  std::string pages;
  for (const auto& file : std::filesystem::recursive_directory_iterator(
           SHARDBOOK_ROOT "/chapters")) {
    if (file.path().extension() == ".md") pages += file_text(file.path());
  }
  const std::regex option("--(no-)?[a-z0-9-]*[a-z0-9]");
  std::set<std::string> explained, names;
  for (std::sregex_iterator at(pages.begin(), pages.end(), option), end;
       at != end; ++at) {
    explained.insert(at->str());
  }
  const std::regex entry("\\n  (-\\w,)?--([\\w-]+)");
  std::vector<std::string> programs = all_chapters();
  programs.emplace_back("cifar_moe");
  for (const std::string& program : programs) {
    const std::string help = run(program, "--help-all").text;
    for (std::sregex_iterator at(help.begin(), help.end(), entry), end;
         at != end; ++at) {
      names.insert((*at)[2]);
    }
  }
  EXPECT_GT(names.size(), 100u);
  for (const std::string& name : names) {
    EXPECT_TRUE(explained.contains("--" + name) ||
                explained.contains("--no-" + name))
        << "no page mentions --" << name;
  }
}

TEST(CommandLine, HelpOfAProgramThatSavesNothingIsSilentAboutIt) {
  const Outcome plan = run_program("chapters/planner/shardbook_plan", "--help");
  EXPECT_EQ(plan.text.find("--save"), std::string::npos) << plan.text;
  expect_text(plan.text, {"0, a plan fits; 1, none does; 2, the"});
}

TEST(CommandLine, HelpNamesEveryModel) {
  const std::string help = run("00_single_device", "--help").text;
  const std::string refused = run("00_single_device", "--model no").text;
  const std::string before = "give one of ";
  std::size_t begin = refused.find(before) + before.size();
  int num_models = 0;
  for (std::size_t end = 0;
       (end = refused.find(", ", begin)) != std::string::npos;
       begin = end + 2, ++num_models) {
    const std::string name = refused.substr(begin, end - begin);
    EXPECT_NE(help.find(name), std::string::npos) << name;
  }
  EXPECT_GE(num_models, 14) << refused;
}

TEST(CommandLine, OptionsThatEndWellTogether) {
  const std::string mlp = "--model mlp --steps 2 --seq 8 --batch 8 ";
  const std::string log = "--log " + (folder() / "claims.jsonl");
  const std::string fsdp =
      "--strategy fsdp --dtype f64 --steps 1 --world-size 2 --batch 4 --seq 8 ";
  for (
      const auto& [chapter, options] :
      std::vector<std::pair<std::string, std::string>>{
          // The last layers have no experts
          {"13_moe", "--world-size 2 --num-experts 4,1 --steps 1"},
          // As in DeepSpeed
          {"13_moe",
           "--min-capacity 0 --steps 1 --batch 4 --seq 8 --data random"},
          // 50,257 rows over dp=2
          {"11_dtensor",
           "--world-size 4 --mesh 2x2 --model gpt2 --backend sim"},
          // The norms in a log take time, which the prediction contains as well
          {"04_model_parallel", mlp + "--variant single " + log},
          {"04_model_parallel", mlp + "--variant model_parallel " + log},
          {"04_model_parallel", mlp + "--variant pipeline " + log},
          // Values that travel in f32 are compared as f32, whatever the model's
          // dtype is
          {"03_zero_fsdp", fsdp + "--param-dtype f32"},
          {"03_zero_fsdp", fsdp + "--reduce-dtype f32"}}) {
    SCOPED_TRACE(options);
    expect_done(run(chapter, options));
  }
}

}  // namespace
}  // namespace shardbook
