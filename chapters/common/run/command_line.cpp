#include "chapters/common/run/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <map>

#include "chapters/common/run/option_values.h"
#include "comm/processes.h"
#include "core/check.h"

namespace shardbook {
namespace {

constexpr const char* kOfSave =
    "--save keeps the weights only. --load begins a new run with them: the\n"
    "optimizer's state, the step and the place in the data begin anew.\n"
    "\n";
constexpr const char* kOfStatus =
    "; 2, the\n"
    "options cannot be followed; 3, the run failed (a rank was lost or late,\n"
    "a disk is full); 128 + n, signal n ended it (130 after Ctrl-C, 143\n"
    "after SIGTERM).";

/// " (did you mean --steps?)" for "--stpes=3", or nothing. A word that begins
/// an option's name also means it.
std::string nearest_option(const CLI::App& app, const std::string& word) {
  const std::size_t begin = word.find_first_not_of('-');
  if (begin == std::string::npos) return "";
  const std::string typed = word.substr(begin, word.find('=') - begin);
  std::size_t fewest = std::max<std::size_t>(1, typed.size() / 3) + 1;
  std::string nearest;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_description().empty()) continue;  // It is refused
    for (const std::string& name : option->get_lnames()) {
      const bool begins = typed.size() > 2 && name.rfind(typed, 0) == 0;
      const std::size_t typos = begins ? 1 : num_typos(typed, name);
      if (typos >= fewest) continue;
      fewest = typos;
      nearest = name;
    }
  }
  return nearest.empty() ? "" : " (did you mean --" + nearest + "?)";
}

}  // namespace

struct CommandLine::Impl {
  using Show = std::function<std::string()>;
  struct Known {
    std::string flag;
    Show show;              ///< its value
    std::string otherwise;  ///< as in ComparedOption
    std::string why_not;    ///< why --resume does not compare it, or empty
    std::function<bool()> compared_if = {};
  };

  CLI::App app;
  std::string results;  ///< the meaning of statuses 0 and 1
  std::vector<std::string> words;
  std::vector<std::shared_ptr<void>> kept;  ///< own()
  std::vector<std::pair<std::string, std::string>> given;
  std::vector<Known> options;
  std::vector<std::function<void()>> after_parse;
  std::vector<std::function<void()>> at_end;
  /// Values that options have when given without one.
  std::map<std::string, std::string> when_alone;
  std::string group = "Options";
  std::vector<CLI::Option*> only_in_help_all;

  Added know(const Flag& flag, const Show& show) {
    options.push_back({flag.name, show, show(), flag.why_not});
    return Added(*this, options.size() - 1);
  }

  /// Adds an option that takes one value and is checked by `parse_value`,
  /// which returns what is wrong, or nothing. `show` returns its value.
  Added add(const Flag& flag, const std::string& type, const std::string& help,
            const Show& show,
            std::function<std::string(const std::string&)> parse_value) {
    app.add_option_function<std::string>(
           flag.name,
           [this, flag = flag.name,
            parse_value](const std::string& given_text) {
             const auto alone = when_alone.find(flag);
             const bool is_alone =
                 given_text.empty() && alone != when_alone.end();
             const std::string text = is_alone ? alone->second : given_text;
             const std::string wrong = parse_value(text);
             SB_CHECK(wrong.empty(), flag, " ", text.empty() ? "''" : text,
                      ": ", wrong);
             given.emplace_back(flag, text);
           },
           help)
        ->group(group)
        ->default_str(show())
        ->type_name(type)
        ->take_last();
    return know(flag, show);
  }

  template <typename T>
  Added add_number(const Flag& flag, T* value, const std::string& help, T min,
                   T max) {
    return add(
        flag, std::is_floating_point_v<T> ? "NUMBER" : "INTEGER", help,
        [value] { return fmt::format("{}", *value); },
        [=](const std::string& text) {
          return parse_number(text, value, min, max);
        });
  }
};

CommandLine::CommandLine(const std::string& program, const std::string& summary,
                         const std::string& results)
    : impl_(std::make_unique<Impl>()) {
  describe(program, summary, results);
  impl_->app.allow_windows_style_options(false);
}

CommandLine::CommandLine(std::vector<std::string> words) : CommandLine("", "") {
  impl_->words = std::move(words);
}

CommandLine::~CommandLine() = default;

void CommandLine::describe(const std::string& program,
                           const std::string& summary,
                           const std::string& results) {
  impl_->app.name(program);
  impl_->app.description(summary);
  impl_->results = results;
}

void CommandLine::keep(std::shared_ptr<void> value) {
  impl_->kept.push_back(std::move(value));
}

void CommandLine::Added::otherwise(const std::string& value) const {
  line_.options[option_].otherwise = value;
}

void CommandLine::Added::compared_if(std::function<bool()> condition) const {
  line_.options[option_].compared_if = std::move(condition);
}

void CommandLine::group(const std::string& name) { impl_->group = name; }

void CommandLine::shorten_help(const std::vector<std::string>& shown) {
  impl_->app.set_help_all_flag("--help-all",
                               "Print also the options of all chapters");
  for (CLI::Option* option : impl_->app.get_options()) {
    const std::string name = option->get_name();
    if (name.rfind("--help", 0) != 0 &&
        std::find(shown.begin(), shown.end(), name) == shown.end()) {
      impl_->only_in_help_all.push_back(option);
    }
  }
}

CommandLine::Added CommandLine::add(const Flag& flag, std::string* value,
                                    const std::string& help,
                                    const std::vector<std::string>& allowed,
                                    const std::string& otherwise) {
  const std::string list = fmt::format("{}", fmt::join(allowed, ", "));
  const bool is_free = allowed.empty();
  return impl_->add(
      flag, is_free ? "TEXT" : "NAME",
      is_free ? help : help + " (" + list + ")", [value] { return *value; },
      [=](const std::string& text) -> std::string {
        if (is_free && text.empty()) return "give a value that is not empty";
        const std::string wrong =
            is_free ? "" : check_name(text, allowed, otherwise);
        if (wrong.empty()) *value = text;
        return wrong;
      });
}

CommandLine::Added CommandLine::add_mode(
    const Flag& flag, std::string* value, const std::string& help,
    const std::vector<std::string>& allowed) {
  const Added added = add(flag, value, help, allowed);
  // CLI11 would take the default for a value that is left out
  impl_->app.get_option(flag.name)->expected(0, 1)->default_str("")->type_name(
      "NAME [" + *value + "]");
  impl_->when_alone[flag.name] = allowed.front();
  return added;
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

void CommandLine::add_of_launcher(const std::vector<std::string>& flags,
                                  int* value) {
  const auto read = [flag = flags.front(), value](const std::string& text) {
    const std::string wrong = parse_number(text, value, 0, 1 << 16);
    SB_CHECK(wrong.empty(), flag, " ", text, ": ", wrong);
  };
  impl_->app
      .add_option_function<std::string>(
          fmt::format("{}", fmt::join(flags, ",")), read)
      ->group("");
}

CommandLine::Added CommandLine::add(const Flag& flag, std::int64_t* value,
                                    const std::string& help, std::int64_t min,
                                    std::int64_t max) {
  return impl_->add_number(flag, value, help, min, max);
}

CommandLine::Added CommandLine::add(const Flag& flag, int* value,
                                    const std::string& help, int min, int max) {
  return impl_->add_number(flag, value, help, min, max);
}

CommandLine::Added CommandLine::add(const Flag& flag, double* value,
                                    const std::string& help, double min,
                                    double max) {
  return impl_->add_number(flag, value, help, min, max);
}

CommandLine::Added CommandLine::add(const Flag& flag, std::uint64_t* value,
                                    const std::string& help) {
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  return impl_->add_number(flag, value, help, std::uint64_t{0},
                           std::uint64_t{kMost});
}

CommandLine::Added CommandLine::add(const Flag& flag, DType* value,
                                    const std::string& help,
                                    const std::vector<std::string>& allowed) {
  return impl_->add(
      flag, "NAME", fmt::format("{} ({})", help, fmt::join(allowed, ", ")),
      [value] { return std::string(dtype_name(*value)); },
      [=](const std::string& text) -> std::string {
        const std::string wrong = check_name(text, allowed);
        if (wrong.empty()) *value = dtype_from_name(text);
        return wrong;
      });
}

CommandLine::Added CommandLine::add(const Flag& flag, bool* value,
                                    const std::string& help) {
  const std::string name = flag.name.substr(2);
  const std::string both =
      flag.name + ",!--" +
      (name.rfind("no-", 0) == 0 ? name.substr(3) : "no-" + name);
  impl_->app
      .add_flag_function(
          both,
          [this, flag = flag.name, value](std::int64_t count) {
            *value = count > 0;
            impl_->given.emplace_back(flag, *value ? "true" : "false");
          },
          help)
      ->group(impl_->group);
  return impl_->know(flag, [value] { return *value ? "true" : "false"; });
}

CommandLine::Added CommandLine::add_bytes(const Flag& flag, std::int64_t* value,
                                          const std::string& help) {
  return impl_->add(
      flag, "BYTES", help, [value] { return std::to_string(*value); },
      [value](const std::string& text) { return parse_bytes(text, value); });
}

const std::string& CommandLine::program() const {
  return impl_->app.get_name();
}

void CommandLine::after_parse(std::function<void()> finish) {
  impl_->after_parse.push_back(std::move(finish));
}

void CommandLine::at_end(std::function<void()> finish) {
  impl_->at_end.push_back(std::move(finish));
}

void CommandLine::parse(int argc, char** argv) {
  const auto is_help_all = [](const std::string& word) {
    return word == "--help-all";
  };
  if (std::none_of(argv, argv + argc, is_help_all)) {
    for (CLI::Option* option : impl_->only_in_help_all) option->group("");
  }
  const CLI::Option* save = impl_->app.get_option_no_throw("--save");
  const bool shows_save = save != nullptr && !save->get_group().empty();
  impl_->app.footer((shows_save ? kOfSave : "") +
                    ("Exit status: " + impl_->results) + kOfStatus);
  try {
    impl_->app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    const int status = impl_->app.exit(help);
    std::cout.flush();
    std::exit(std::cout ? status : kExitRunFailed);
  } catch (const CLI::ParseError& error) {
    std::string text = error.what();
    std::replace(text.begin(), text.end(), '\n', ' ');
    if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
      const std::vector<std::string> words = impl_->app.remaining();
      text = fmt::format("unknown option {}{}", fmt::join(words, " "),
                         nearest_option(impl_->app, words.front()));
    }
    const char* command = std::getenv("SHARDBOOK_COMMAND");
    SB_FAIL(text, "; see ", command ? command : program(), " --help");
  }
  for (const auto& finish : impl_->after_parse) finish();
  for (const auto& finish : impl_->at_end) finish();
}

void CommandLine::parse() {
  std::vector<char*> words;
  for (std::string& each : impl_->words) words.push_back(each.data());
  parse(static_cast<int>(words.size()), words.data());
}

const std::vector<std::pair<std::string, std::string>>& CommandLine::given()
    const {
  return impl_->given;
}

bool CommandLine::has(const std::string& flag) const {
  return std::any_of(impl_->given.begin(), impl_->given.end(),
                     [&](const auto& each) { return each.first == flag; });
}

std::vector<std::pair<std::string, std::string>> CommandLine::values() const {
  std::vector<std::pair<std::string, std::string>> values = {
      {"the program", program()}};
  for (const Impl::Known& each : impl_->options) {
    values.emplace_back(each.flag, each.show());
  }
  return values;
}

std::vector<ComparedOption> CommandLine::compared() const {
  std::vector<ComparedOption> compared;
  for (const Impl::Known& each : impl_->options) {
    if (!each.why_not.empty()) continue;
    if (each.compared_if && !each.compared_if()) continue;
    compared.push_back({each.flag, each.show(), each.otherwise});
  }
  return compared;
}

std::vector<std::pair<std::string, std::string>> CommandLine::not_compared()
    const {
  std::vector<std::pair<std::string, std::string>> others;
  for (const Impl::Known& each : impl_->options) {
    if (!each.why_not.empty()) others.emplace_back(each.flag, each.why_not);
  }
  return others;
}

}  // namespace shardbook
