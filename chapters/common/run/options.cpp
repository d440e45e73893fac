#include "chapters/common/run/options.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <limits>
#include <map>
#include <system_error>

#include "chapters/common/models/models.h"
#include "comm/processes.h"
#include "comm/signals.h"

namespace shardbook {
namespace {

std::atomic<bool> has_begun{false};

constexpr const char* kFooter =
    "--save keeps the weights only. --load begins a new run with them: the\n"
    "optimizer's state, the step and the place in the data begin anew.\n"
    "\n"
    "Exit status: 0, every claim holds; 1, a claim does not hold; 2, the\n"
    "options cannot be followed; 3, the run failed (a rank was lost or late,\n"
    "a disk is full); 128 + n, signal n ended it (130 after Ctrl-C, 143\n"
    "after SIGTERM).";

std::string quoted(const std::string& text) {
  return text.empty() ? "''" : text;
}

}  // namespace

struct CommandLine::Impl {
  using Show = std::function<std::string()>;

  CLI::App app;
  std::vector<std::pair<std::string, std::string>> given;
  std::vector<std::pair<std::string, Show>> shows;
  std::vector<std::function<void()>> after_parse;
  std::vector<std::function<void()>> at_end;
  /// Values of options that are given without one.
  std::map<std::string, std::string> when_alone;

  /// Adds an option that takes one value and is checked by `parse_value`,
  /// which returns what is wrong, or nothing. `show` returns its value.
  void add(const std::string& flag, const std::string& type,
           const std::string& help, const Show& show,
           std::function<std::string(const std::string&)> parse_value) {
    shows.emplace_back(flag, show);
    app.add_option_function<std::string>(
           flag,
           [this, flag, parse_value](const std::string& given_text) {
             const auto alone = when_alone.find(flag);
             const bool is_alone =
                 given_text.empty() && alone != when_alone.end();
             const std::string text = is_alone ? alone->second : given_text;
             const std::string wrong = parse_value(text);
             if (!wrong.empty()) {
               SB_FAIL(flag, " ", quoted(text), ": ", wrong);
             }
             given.emplace_back(flag, text);
           },
           help)
        ->default_str(show())
        ->type_name(type)
        ->take_last();
  }
};

CommandLine::CommandLine(const std::string& program, const std::string& summary)
    : impl_(std::make_unique<Impl>()) {
  impl_->app.name(program);
  impl_->app.description(summary);
  impl_->app.footer(kFooter);
  impl_->app.allow_windows_style_options(false);
}

CommandLine::~CommandLine() = default;

namespace {

template <typename T>
std::string parse_number(const std::string& text, T* value, T min, T max,
                         const char* what) {
  T number{};
  std::size_t used = 0;
  try {
    if constexpr (std::is_floating_point_v<T>) {
      number = std::stod(text, &used);
    } else {
      const long long wide = std::stoll(text, &used);
      number = static_cast<T>(wide);
      if (static_cast<long long>(number) != wide) used = 0;
    }
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size()) {
    return fmt::format("not {}; give a value from {} to {}", what, min, max);
  }
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(number)) return "not a number";
  }
  if (number < min || number > max) {
    return fmt::format("out of range; give a value from {} to {}", min, max);
  }
  *value = number;
  return "";
}

}  // namespace

void CommandLine::add(const std::string& flag, std::string* value,
                      const std::string& help,
                      const std::vector<std::string>& allowed,
                      const std::string& otherwise) {
  std::string list;
  for (const std::string& name : allowed) {
    list += (list.empty() ? "" : ", ") + name;
  }
  const bool is_free = allowed.empty();
  impl_->add(
      flag, is_free ? "TEXT" : "NAME",
      is_free ? help : help + " (" + list + ")", [value] { return *value; },
      [=](const std::string& text) -> std::string {
        if (is_free && text.empty()) return "give a value that is not empty";
        if (!is_free &&
            std::find(allowed.begin(), allowed.end(), text) == allowed.end()) {
          return "give one of " + list +
                 (otherwise.empty() ? "" : "; " + otherwise);
        }
        *value = text;
        return "";
      });
}

void CommandLine::add_mode(const std::string& flag, std::string* value,
                           const std::string& help,
                           const std::vector<std::string>& allowed) {
  add(flag, value, help, allowed);
  // CLI11 would take the default for a value that is left out
  impl_->app.get_option(flag)->expected(0, 1)->default_str("")->type_name(
      "NAME [" + *value + "]");
  impl_->when_alone[flag] = allowed.front();
}

void CommandLine::refuse(const std::string& flag, const std::string& why) {
  impl_->app
      .add_option_function<std::string>(flag,
                                        [flag, why](const std::string& text) {
                                          SB_FAIL(flag, text.empty() ? "" : " ",
                                                  text, ": ", why);
                                        })
      ->group("")
      ->expected(0, 1);
}

void CommandLine::add(const std::string& flag, std::int64_t* value,
                      const std::string& help, std::int64_t min,
                      std::int64_t max) {
  impl_->add(
      flag, "INTEGER", help, [value] { return std::to_string(*value); },
      [=](const std::string& text) {
        return parse_number(text, value, min, max, "an integer");
      });
}

void CommandLine::add(const std::string& flag, int* value,
                      const std::string& help, int min, int max) {
  impl_->add(
      flag, "INTEGER", help, [value] { return std::to_string(*value); },
      [=](const std::string& text) {
        return parse_number(text, value, min, max, "an integer");
      });
}

void CommandLine::add(const std::string& flag, double* value,
                      const std::string& help, double min, double max) {
  impl_->add(
      flag, "NUMBER", help, [value] { return fmt::format("{}", *value); },
      [=](const std::string& text) {
        return parse_number(text, value, min, max, "a number");
      });
}

void CommandLine::add(const std::string& flag, std::uint64_t* value,
                      const std::string& help) {
  impl_->add(
      flag, "INTEGER", help, [value] { return std::to_string(*value); },
      [=](const std::string& text) {
        std::int64_t number = 0;
        const std::string wrong = parse_number(
            text, &number, std::int64_t{0},
            std::numeric_limits<std::int64_t>::max(), "an integer");
        *value = static_cast<std::uint64_t>(number);
        return wrong;
      });
}

void CommandLine::add(const std::string& flag, DType* value,
                      const std::string& help,
                      const std::vector<std::string>& allowed) {
  auto name = std::make_shared<std::string>(dtype_name(*value));
  add(flag, name.get(), help, allowed);
  impl_->after_parse.push_back(
      [name, value] { *value = dtype_from_name(*name); });
}

void CommandLine::add(const std::string& flag, bool* value,
                      const std::string& help) {
  const std::string name = flag.substr(2);
  const std::string both =
      flag + ",!--" +
      (name.rfind("no-", 0) == 0 ? name.substr(3) : "no-" + name);
  impl_->shows.emplace_back(flag,
                            [value] { return *value ? "true" : "false"; });
  impl_->app.add_flag_function(
      both,
      [this, flag, value](std::int64_t count) {
        *value = count > 0;
        impl_->given.emplace_back(flag, *value ? "true" : "false");
      },
      help);
}

void CommandLine::add_bytes(const std::string& flag, std::int64_t* value,
                            const std::string& help) {
  impl_->add(
      flag, "BYTES", help, [value] { return std::to_string(*value); },
      [value](const std::string& text) -> std::string {
        const char* allowed =
            "give bytes, such as 1000000, 64MiB, 2GiB or 1.5GB";
        std::size_t used = 0;
        double number = -1;
        try {
          number = std::stod(text, &used);
        } catch (const std::exception&) {
          return allowed;
        }
        const std::string unit = text.substr(used);
        const std::pair<const char*, double> kUnits[] = {
            {"", 1},
            {"B", 1},
            {"KB", 1e3},
            {"MB", 1e6},
            {"GB", 1e9},
            {"TB", 1e12},
            {"KiB", 1024.0},
            {"MiB", 1048576.0},
            {"GiB", 1073741824.0},
            {"TiB", 1099511627776.0}};
        for (const auto& [name, factor] : kUnits) {
          const double bytes = number * factor;
          if (unit == name && bytes >= 0 && bytes < 1e18) {
            *value = static_cast<std::int64_t>(bytes);
            return "";
          }
        }
        return allowed;
      });
}

void CommandLine::after_parse(std::function<void()> finish) {
  impl_->after_parse.push_back(std::move(finish));
}

void CommandLine::at_end(std::function<void()> finish) {
  impl_->at_end.push_back(std::move(finish));
}

void CommandLine::parse(int argc, char** argv) {
  try {
    impl_->app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    const int status = impl_->app.exit(help);
    std::cout.flush();
    std::exit(std::cout ? status : kExitRunFailed);
  } catch (const CLI::ParseError& error) {
    std::string text = error.what();
    for (char& c : text) {
      if (c == '\n') c = ' ';
    }
    if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
      std::string extras;
      for (const std::string& extra : impl_->app.remaining()) {
        extras += (extras.empty() ? "" : " ") + extra;
      }
      text = "unknown option " + extras;
    }
    SB_FAIL(text, "; see ", impl_->app.get_name(), " --help");
  }
  for (const auto& finish : impl_->after_parse) finish();
  for (const auto& finish : impl_->at_end) finish();
}

const std::vector<std::pair<std::string, std::string>>& CommandLine::given()
    const {
  return impl_->given;
}

std::vector<std::pair<std::string, std::string>> CommandLine::values() const {
  std::vector<std::pair<std::string, std::string>> values = {
      {"the program", impl_->app.get_name()}};
  for (const auto& [flag, show] : impl_->shows) {
    values.emplace_back(flag, show());
  }
  return values;
}

std::vector<int> read_counts(const std::string& option, const std::string& text,
                             const std::string& allowed) {
  std::vector<int> counts;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const bool is_number =
        !word.empty() && word.size() <= 9 &&
        word.find_first_not_of("0123456789") == std::string::npos;
    SB_CHECK(is_number && std::stoi(word) >= 1, option, " ", text, ": ",
             allowed);
    counts.push_back(std::stoi(word));
    begin = end + 1;
  }
  return counts;
}

void add_shared_options(CommandLine& line, Options& o,
                        const std::vector<std::string>& backends,
                        const std::string& no_other) {
  line.add("--world-size", &o.world_size, "number of ranks", 1, 1 << 16);
  line.add("--backend", &o.backend, "what the ranks are", backends, no_other);
  line.add("--device", &o.device, "where tensors live", {"cpu"});
  line.add("--model", &o.model,
           "mlp, gpt-nano, gpt-micro, gpt2, gpt2-medium, gpt2-large, gpt2-xl, "
           "gpt-1.3b, gpt-6.7b, gpt-13b, gpt-175b, resnet18, resnet50, or a "
           "config FILE.json of GPT-2 or ResNet");
  line.add(
      "--data", &o.data,
      "book, random, walk (a random walk), FILE (bytes) or FILE.u16 (GPT-2 "
      "token ids); images are random");
  line.add("--dtype", &o.dtype, "element type of the model",
           {"f32", "f64", "bf16", "f16"});
  line.add("--steps", &o.steps, "optimizer steps");
  line.add("--batch", &o.batch, "samples per step, over all ranks", 1);
  line.add("--seq", &o.seq, "tokens per sample", 1);
  line.add("--image-size", &o.image_size, "height and width of images", 1,
           4096);
  line.add("--seed", &o.seed, "seed of weights and dropout");
  line.add("--optimizer", &o.optimizer, "how weights are updated",
           {"sgd", "adam", "adamw"});
  OptimizerOptions& opt = o.optimizer_options;
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
  line.add("--dropout", &o.dropout, "probability", 0, 0.999);
  line.add("--load", &o.load,
           "begin with these weights (safetensors); does not continue a run");
  line.add("--save", &o.save,
           "write the weights here at the end (safetensors); the file is "
           "replaced as a whole or not at all");
  line.add("--save-non-finite", &o.save_non_finite,
           "--save also weights that are infinite or not a number");
  line.add("--log", &o.log, "one JSON object per step (JSON lines)");
  line.add("--trace", &o.trace, "events for Perfetto (Chrome trace JSON)");
  line.add("--cluster", &o.cluster,
           "where virtual time passes: a preset, FILE.json, or none");
  line.add("--timeline", &o.timeline,
           "virtual time: text, or FILE.json for Perfetto (Chrome trace)");
  line.add("--fold", &o.fold, "sim: run ranks that do the same once");
  line.add("--logits", &o.logits,
           "write the first batch and its logits after training "
           "(safetensors)");
  line.add("--format", &o.format, "of the report", {"text", "json"});
  line.add("--report", &o.report,
           "write the report here, as JSON, beside what --format prints");
  line.add("--check", &o.check, "compare with one device");
  line.add("--deterministic", &o.deterministic,
           "sum in one fixed order, whatever the shape");
  line.add_bytes("--device-memory", &o.device_memory_bytes,
                 "capacity of each emulated device; 0 for no limit");
  line.add("--timeout", &o.timeout_s,
           "seconds a call waits for its peers before it names who is missing",
           0.001);
  line.add("--rendezvous", &o.rendezvous,
           "gloo on several hosts: file:FOLDER, tcp:HOST:PORT or "
           "redis:HOST:PORT");
  line.add("--interface", &o.network_interface,
           "gloo on several hosts: network interface, such as eth0");
  // Images are random, and one sample is one label.
  line.after_parse([&line, &o] {
    if (!ModelConfig::read(o.model).is_image()) return;
    o.seq = 1;
    for (const auto& [flag, value] : line.given()) {
      if (flag == "--data") return;
    }
    o.data = "random";
  });
  // On shapes, steps repeat each other.
  line.after_parse([&line, &o] {
    if (o.backend != "sim") return;
    for (const auto& [flag, value] : line.given()) {
      if (flag == "--steps") return;
    }
    o.steps = 3;
  });
  line.at_end([&line, &o] { o.effective = line.values(); });
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

}  // namespace

void check_options(const Options& o) {
  const OptimizerOptions& opt = o.optimizer_options;
  SB_CHECK(!opt.nesterov || (o.optimizer == "sgd" && opt.momentum > 0),
           "--nesterov: needs --optimizer sgd and a --momentum above 0");
  SB_CHECK(opt.momentum == 0 || o.optimizer == "sgd", "--momentum ",
           opt.momentum, ": only --optimizer sgd has a momentum");
  SB_CHECK(opt.beta1 < 1 && opt.beta2 < 1,
           "--beta1, --beta2: give values below 1");
  // The first rank writes; its files may be out of the others' sight.
  if (!is_first_process()) return;
  check_writable("--save", o.save, /*replaces=*/true);
  check_writable("--logits", o.logits, /*replaces=*/true);
  check_writable("--log", o.log, /*replaces=*/false);
  check_writable("--trace", o.trace, /*replaces=*/false);
  if (o.timeline != "text") {
    check_writable("--timeline", o.timeline, /*replaces=*/false);
  }
}

const char* const kBatchNormDiffers =
    "batch norm sees its rank's images only, so no run on several ranks equals "
    "one device; see 04_model_parallel and 00_single_device";

void refuse_image_models(const Options& options, const std::string& reason) {
  SB_CHECK(!ModelConfig::read(options.model).is_image(), "--model ",
           options.model, ": ", reason);
}

LaunchOptions launch_options(const Options& o) {
  LaunchOptions launch;
  launch.backend = o.backend;
  launch.timeout =
      std::chrono::milliseconds(static_cast<std::int64_t>(o.timeout_s * 1e3));
  launch.device_memory_bytes = o.device_memory_bytes;
  launch.deterministic = o.deterministic;
  launch.rendezvous = o.rendezvous;
  launch.network_interface = o.network_interface;
  // Each host has its own name for the place where the ranks meet.
  for (const auto& [option, value] : o.effective) {
    if (option == "--rendezvous" || option == "--interface") continue;
    launch.agreed.emplace_back(option, value);
  }
  return launch;
}

bool interrupted() { return received_signal() != 0; }

void begin_run() { has_begun = true; }

namespace {

// What went wrong, as the exit status tells it.
int status_of(const std::exception& error) {
  if (dynamic_cast<const OptionsDiffer*>(&error) != nullptr) {
    return kExitBadInput;
  }
  // The system's answer, such as a full disk, is no mistake in the options.
  if (dynamic_cast<const RunError*>(&error) != nullptr ||
      dynamic_cast<const std::system_error*>(&error) != nullptr) {
    return kExitRunFailed;
  }
  return has_begun ? kExitRunFailed : kExitBadInput;
}

}  // namespace

int chapter_main(const std::function<int()>& body) {
  watch_signals();
  try {
    const int status = body();
    // A program that reports to a full disk must not end well.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      throw RunError(std::string("standard output cannot be written: ") +
                     std::strerror(errno));
    }
    return status;
  } catch (const Interrupted& stop) {
    if (is_first_process()) std::fprintf(stderr, "%s\n", stop.what());
    return 128 + received_signal();
  } catch (const std::exception& error) {
    // What fails after a signal, fails because another rank has stopped.
    if (interrupted()) return 128 + received_signal();
    const int status = status_of(error);
    // Copies of this program were given the same options: one of them speaks
    const auto rank = rank_environment();
    const bool is_copy = rank && rank->launcher == "shardbook";
    if (status != kExitBadInput || !is_copy || rank->rank == 0) {
      std::fprintf(stderr, "error: %s\n", error.what());
    }
    return status;
  }
}

}  // namespace shardbook
