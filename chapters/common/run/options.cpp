#include "chapters/common/run/options.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <system_error>
#include <utility>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/llama_experts.h"
#include "chapters/common/models/models.h"
#include "comm/processes.h"
#include "comm/signals.h"
#include "core/check.h"
#include "core/text_file.h"

namespace shardbook {
namespace {

// "ch02_ddp" is the program of "02_ddp"; any other has its own name.
std::string chapter_of(const std::string& program) {
  const bool is_chapter =
      program.starts_with("ch") && std::isdigit(program[2]) != 0;
  return is_chapter ? program.substr(2) : program;
}

}  // namespace

void add_shared_options(CommandLine& line, Options& o,
                        const std::vector<std::string>& backends,
                        const std::string& no_other) {
  o.chapter = chapter_of(line.program());
  line.group("Ranks");
  line.add({"--world-size", may_differ::kRanks}, &o.world_size,
           "number of ranks", 1, 1 << 16);
  line.add({"--backend", may_differ::kRanks}, &o.backend, "what the ranks are",
           backends, no_other);
  line.add({"--device", may_differ::kSums}, &o.device, "where tensors live",
           {"cpu", "cuda"});
  line.add_bytes({"--device-memory", may_differ::kPlace},
                 &o.device_memory_bytes,
                 "capacity of each device; 0 for no limit");
  line.add("--tf32", &o.tf32,
           "with --device cuda: products of f32 on tensor cores, from operands "
           "of 10 bits");
  line.add({"--deterministic", may_differ::kSums}, &o.deterministic,
           "sum in one fixed order, whatever the shape");
  line.add({"--rendezvous-sends", may_differ::kPlace}, &o.rendezvous_sends,
           "threads: a send is done when its receiver has the message, however "
           "small; by default up to 64 KiB are buffered");
  line.add({"--timeout", may_differ::kPlace}, &o.timeout_s,
           "seconds a call waits for its peers before it names who is missing",
           0.001);
  line.add({"--rendezvous", may_differ::kPlace}, &o.rendezvous,
           "processes on several hosts: file:FOLDER, tcp:HOST:PORT or "
           "redis:HOST:PORT");
  line.add({"--interface", may_differ::kPlace}, &o.network_interface,
           "processes on several hosts: network interface, such as eth0");
  accept_local_rank(line);
  line.group("Model");
  line.add({"--model", "its keys are compared, not its name"}, &o.model,
           "mlp, gpt-nano, gpt-micro, gpt2, gpt2-medium, gpt2-large, gpt2-xl, "
           "gpt-1.3b, gpt-6.7b, gpt-13b, gpt-70b, gpt-175b, llama-nano, "
           "llama-micro, smollm2-135m, llama-3.2-1b, llama-2-7b, llama-3.1-8b, "
           "llama-3.1-70b, llama-3.1-405b, mistral-7b, qwen2.5-0.5b, "
           "qwen3-0.6b, mixtral-8x7b, qwen3-30b-a3b, resnet18, resnet50, or a "
           "config FILE.json of a GPT-2 or ResNet or Llama");
  line.add("--dtype", &o.dtype, "element type of the model",
           {"f32", "f64", "bf16", "f16"});
  line.add("--dropout", &o.dropout, "probability", 0, 0.999);
  line.add({"--load", may_differ::kFirstWeights}, &o.load,
           "begin with these weights (safetensors); does not continue a run");
  line.add({"--save", may_differ::kOutput}, &o.save,
           "write the weights here at the end (safetensors); the file is "
           "replaced as a whole or not at all");
  line.add({"--save-names", may_differ::kOutput}, &o.save_names,
           "the names of a ResNet's weights in --save; those of a GPT are "
           "transformers'",
           {"torchvision", "transformers"});
  line.add({"--save-non-finite", may_differ::kOutput}, &o.save_non_finite,
           "--save also weights that are infinite or not a number");
  line.group("Data");
  line.add("--data", &o.data,
           "book, random, walk (a random walk), FILE (text, as bytes) or a "
           "file of token ids: .npy, .u16, .u32, llm.c's .bin, Megatron-LM's "
           ".bin; images are random");
  line.add({"--data-format", "the tokens are compared, however they were read"},
           &o.data_format,
           "how FILE is read: auto, by its header and name; token ids without "
           "a header, as nanoGPT's .bin (u16); or any bytes",
           {"auto", "bytes", "u16", "u32"});
  line.add("--batch", &o.batch, "samples per step, over all ranks", 1);
  line.add("--seq", &o.seq, "tokens per sample", 1);
  line.add("--image-size", &o.image_size, "height and width of images", 1,
           4096);
  line.add("--seed", &o.seed, "seed of weights and dropout");
  line.add({"--logits", may_differ::kOutput}, &o.logits,
           "write the first batch and its logits after training (safetensors), "
           "or to FILE.npy the logits alone");
  line.group("Training");
  line.add("--steps", &o.steps, "optimizer steps").compared_if([&o] {
    return o.lr_schedule != "constant";
  });
  OptimizerOptions& opt = o.optimizer_options;
  line.add("--optimizer", &o.optimizer, "how weights are updated",
           {"sgd", "adam", "adamw"});
  line.add("--lr", &opt.lr, "learning rate");
  line.add("--weight-decay", &opt.weight_decay, "as PyTorch's optimizers");
  line.add("--momentum", &opt.momentum, "of sgd", 0, 1);
  line.add("--nesterov", &opt.nesterov, "Nesterov momentum of sgd");
  line.add("--beta1", &opt.beta1, "of adam and adamw", 0, 1);
  line.add("--beta2", &opt.beta2, "of adam and adamw", 0, 1);
  line.add("--eps", &opt.eps, "of adam and adamw");
  line.add("--lr-schedule", &o.lr_schedule, "learning rate over the steps",
           {"constant", "linear", "cosine"});
  line.add("--warmup", &o.warmup, "steps over which the rate rises");
  line.add("--clip", &o.clip, "largest gradient norm; 0 for none");
  line.add({"--checkpoint", may_differ::kOutput}, &o.checkpoint,
           "keep the training here, a folder: weights, optimizer, step; at the "
           "end and at SIGINT and SIGTERM, which then lose nothing");
  line.add({"--checkpoint-every", may_differ::kOutput}, &o.checkpoint_every,
           "steps between checkpoints, of which the last two are kept");
  line.add({"--resume", may_differ::kOutput}, &o.resume,
           "go on from the newest checkpoint in --checkpoint, on any number of "
           "ranks; --steps counts from the beginning");
  line.group("Cluster");
  line.add({"--cluster", may_differ::kPlace}, &o.cluster,
           "where virtual time passes: a preset, FILE.json, or none");
  add_software(line, o.cluster);
  line.add({"--timeline", may_differ::kOutput}, &o.timeline,
           "virtual time: text (the last step), or FILE.json for Perfetto "
           "(Chrome trace; of a long run the first and the last steps)");
  line.add({"--trace", may_differ::kOutput}, &o.trace,
           "every event in wall time, for Perfetto (Chrome trace JSON)");
  line.add({"--fold", may_differ::kPlace}, &o.fold,
           "sim: run ranks that do the same once");
  line.group("Output");
  line.add({"--format", may_differ::kOutput}, &o.format, "of the report",
           {"text", "json"});
  line.add({"--report", may_differ::kOutput}, &o.report,
           "write the report here, as JSON, beside what --format prints");
  line.add({"--log", may_differ::kOutput}, &o.log,
           "one JSON object per step (JSON lines)");
  line.add({"--check", may_differ::kOutput}, &o.check,
           "compare with one device");
  line.shorten_help({"--world-size", "--backend", "--device", "--model",
                     "--dtype", "--data", "--batch", "--seq", "--steps",
                     "--cluster", "--timeline", "--format", "--check"});
  line.group("This chapter");
  line.after_parse([&line, &o] {
    // Images are random, and one sample is one label
    if (ModelConfig::read(o.model).is_image()) {
      o.seq = 1;
      if (!line.has("--data")) o.data = "random";
    }
    // On shapes, steps repeat each other
    if (o.backend == "sim" && !line.has("--steps")) o.steps = 3;
  });
  line.at_end([&line, &o] { o.effective = line.values(); });
}

void add_software(CommandLine& line, std::string& cluster) {
  std::string& given = line.own<std::string>();
  line.after_parse([&given, &cluster] {
    if (given.empty()) return;
    SB_CHECK(cluster != "none", "--software ", given,
             ": --cluster none has no virtual time; give another --cluster");
    cluster += "+" + given;
  });
  line.add({"--software", may_differ::kPlace}, &given,
           "what trains on --cluster: a preset or FILE.json; its own");
}

void accept_local_rank(CommandLine& line) {
  const auto given = std::make_shared<int>(-1);
  line.add_of_launcher({"--local_rank", "--local-rank"}, given.get());
  line.after_parse([given] {
    if (*given < 0) return;
    const auto rank = rank_environment();
    // Copies of this program have the option of the one that was started.
    if (rank && rank->launcher == "shardbook") return;
    // As launchers do that set no LOCAL_RANK
    if (rank && rank->launcher == "torchrun" &&
        std::getenv("LOCAL_RANK") == nullptr) {
      setenv("LOCAL_RANK", std::to_string(*given).c_str(), 1);
      return;
    }
    const int known = rank ? rank->local_rank : 0;
    SB_CHECK(*given == known, "--local_rank ", *given, ": ",
             rank ? "the variables of " + rank->launcher + " give "
                  : "no launcher has started this process, so it is ",
             known, "; leave the option to the launcher");
  });
}

namespace {

// Throws unless the run can write this file at its end: in its place, or as a
// new file that replaces it.
void check_writable(const std::string& option, const std::string& path,
                    bool replaces) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  std::error_code ignored;
  SB_CHECK(!fs::is_directory(path, ignored), option, " ", path,
           ": it is a folder; give the name of a file");
  const bool exists = fs::exists(path, ignored);
  SB_CHECK(!replaces || !exists || fs::is_regular_file(path, ignored), option,
           " ", path, ": it exists and is not an ordinary file");
  if (exists && !replaces) {
    SB_CHECK(access(path.c_str(), W_OK) == 0, option, " ", path,
             ": cannot be written: ", std::strerror(errno));
    return;
  }
  fs::path folder = fs::path(path).parent_path();
  if (folder.empty()) folder = ".";
  SB_CHECK(access(folder.c_str(), W_OK | X_OK) == 0, option, " ", path,
           ": cannot create a file in ", folder.string(), ": ",
           std::strerror(errno));
}

// The one-device run of the comparison loads the file of --load after the run
// has written --save, so the two must differ.
void check_load_and_save(const Options& o) {
  if (!o.load.empty()) check_config_of_file(o.load, ModelConfig::read(o.model));
  if (!o.check || o.load.empty() || o.save.empty()) return;
  std::error_code missing;
  SB_CHECK(!std::filesystem::equivalent(o.load, o.save, missing), "--save ",
           o.save,
           ": the file of --load, which the run on one device reads after this "
           "one; give another name, or --no-check");
}

// Counts and bytes of a step stay far below 2^63, on shapes as well.
void check_sizes(const Options& o) {
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 28;
  SB_CHECK(o.batch <= kMostTokens / std::min(o.seq, kMostTokens), "--batch ",
           o.batch, ", --seq ", o.seq, ": give a product of at most ",
           kMostTokens, " tokens");
  // Steps on shapes repeat each other
  constexpr std::int64_t kMostSteps = 10000;
  SB_CHECK(o.backend != "sim" || o.steps <= kMostSteps, "--steps ", o.steps,
           ": steps of --backend sim repeat each other; give at most ",
           kMostSteps);
}

void check_checkpoint(const Options& o) {
  SB_CHECK(!o.checkpoint.empty() || (o.checkpoint_every == 0 && !o.resume),
           o.resume ? "--resume" : "--checkpoint-every",
           ": needs --checkpoint FOLDER");
  SB_CHECK(o.checkpoint.empty() || o.backend != "sim", "--checkpoint ",
           o.checkpoint, ": --backend sim has shapes and nothing to keep");
}

// What would be left out, or would spoil what else is printed.
void check_outputs(const Options& o) {
  for (const auto& [option, path] :
       {std::pair("--save", o.save), std::pair("--logits", o.logits)}) {
    SB_CHECK(path.empty() || o.backend != "sim", option, " ", path,
             ": --backend sim has shapes and no values to write; leave it out");
  }
  SB_CHECK(o.timeline.empty() || o.cluster != "none", "--timeline ", o.timeline,
           ": shows virtual time, and --cluster none has no clock; give "
           "another --cluster, or --trace for wall time");
  SB_CHECK(o.timeline != "text" || o.format != "json",
           "--timeline text: --format json prints one object and no picture; "
           "give --timeline FILE.json");
}

// Which devices go with which backends, and whether they are here.
void check_device(const Options& o) {
  SB_CHECK(!o.tf32 || o.device == "cuda", "--tf32: only with --device cuda");
  if (o.backend == "sim") {
    SB_CHECK(o.device == "cpu", "--device ", o.device,
             ": --backend sim has shapes and no device; leave out --device");
    SB_CHECK(!o.rendezvous_sends,
             "--rendezvous-sends: --backend sim moves no data, so its sends "
             "never wait; give --backend threads");
  } else {
    check_launch(o.world_size, launch_options(o));
  }
}

// A launcher's processes become ranks of one run on gloo and nccl only.
void warn_of_launcher(const WorldOptions& o) {
  const auto rank = rank_environment();
  if (o.backend == "gloo" || o.backend == "nccl" || !rank || rank->rank > 0) {
    return;
  }
  std::fprintf(stderr,
               "warning: %s has started %d copies of this program (%s), and "
               "with --backend %s each of them does the whole run alone; give "
               "--backend %s --world-size %d to make them the ranks of one "
               "run, or start the program without %s\n",
               rank->launcher.c_str(), rank->world_size,
               rank->size_variable.c_str(), o.backend.c_str(),
               o.device == "cuda" ? "nccl" : "gloo", rank->world_size,
               rank->launcher.c_str());
}

/// A balancing loss is of all tokens of a batch: some chapters have no place that
/// sees them together.
void check_family(const Options& o) {
  if (!ModelConfig::is_named(o.model)) return;  // refused where it is made
  const ModelConfig config = ModelConfig::read(o.model);
  if (!config.is_llama()) return;
  check_sequence(config, o.seq);
  for (const char* chapter : {"01_data_parallel", "04_model_parallel",
                              "05_gpipe", "06_1f1b", "12_sequence_parallel"}) {
    SB_CHECK(!config.llama.has_balancing_loss() || o.chapter != chapter,
             "--model ", o.model, ": ", kBalancingLossInParts);
  }
}

}  // namespace

void check_options(const Options& o) {
  check_sizes(o);
  check_family(o);
  check_device(o);
  warn_of_launcher(o);
  const OptimizerOptions& opt = o.optimizer_options;
  SB_CHECK(!opt.nesterov || (o.optimizer == "sgd" && opt.momentum > 0),
           "--nesterov: needs --optimizer sgd and a --momentum above 0");
  SB_CHECK(opt.momentum == 0 || o.optimizer == "sgd", "--momentum ",
           opt.momentum, ": only --optimizer sgd has a momentum");
  SB_CHECK(opt.beta1 < 1 && opt.beta2 < 1,
           "--beta1, --beta2: give values below 1");
  check_checkpoint(o);
  check_outputs(o);
  check_load_and_save(o);
  // The first rank writes; other hosts may not see its files.
  if (!is_first_process()) return;
  check_writable("--save", o.save, /*replaces=*/true);
  check_writable("--logits", o.logits, /*replaces=*/true);
  check_writable("--log", o.log, /*replaces=*/false);
  check_writable("--report", o.report, /*replaces=*/false);
  check_writable("--trace", o.trace, /*replaces=*/false);
  if (o.timeline != "text") {
    check_writable("--timeline", o.timeline, /*replaces=*/false);
  }
}

const char* const kBatchNormDiffers =
    "batch norm sees its rank's images only, so no run on several ranks equals "
    "one device that sees the whole batch; 14_hybrid_3d compares with one that "
    "takes the same micro-batches";

void refuse_image_models(const Options& options, const std::string& reason) {
  SB_CHECK(!ModelConfig::read(options.model).is_image(), "--model ",
           options.model, ": ", reason);
}

LaunchOptions launch_options(const Options& o) {
  LaunchOptions launch;
  launch.backend = o.backend;
  launch.device = o.device;
  launch.timeout =
      std::chrono::milliseconds(static_cast<std::int64_t>(o.timeout_s * 1e3));
  launch.device_memory_bytes = o.device_memory_bytes;
  launch.deterministic = o.deterministic;
  launch.rendezvous_sends = o.rendezvous_sends;
  launch.rendezvous = o.rendezvous;
  launch.network_interface = o.network_interface;
  // Hosts may name the place where the ranks meet differently.
  for (const auto& [option, value] : o.effective) {
    if (option == "--rendezvous" || option == "--interface") continue;
    launch.agreed.emplace_back(option, value);
  }
  return launch;
}

}  // namespace shardbook
