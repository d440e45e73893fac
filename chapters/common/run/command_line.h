#pragma once

// A program's command line: options by name, each with a check of its own.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"

namespace shardbook {

/// An option that a run must share with the one that it continues (--resume).
struct ComparedOption {
  std::string name, value;
  /// The value as which programs without the option train.
  std::string otherwise;
};

/// Reasons for options that may differ there.
namespace may_differ {
inline constexpr char kRanks[] =
    "runs move to other ranks; that changes the rounding of sums alone";
inline constexpr char kSums[] =
    "it changes the order of sums, and so their rounding alone";
inline constexpr char kPlace[] =
    "it changes when or where numbers are computed, kept or sent, not their "
    "values";
inline constexpr char kOutput[] =
    "it changes what the program prints or writes";
inline constexpr char kFirstWeights[] =
    "it sets the first weights, in whose place come those of the checkpoint";
}  // namespace may_differ

/// The name of an option. `why_not`: --resume does not compare it, since it does
/// not change the numbers, or they are compared elsewhere; "": it does.
struct Flag {
  Flag(const char* name) : name(name) {}
  Flag(std::string name, std::string why_not = "")
      : name(std::move(name)), why_not(std::move(why_not)) {}
  std::string name, why_not;
};

/// Options by name, each with a check of its own. Wraps CLI11.
///
/// --resume compares every option with the run that it continues, unless the
/// option's declaration has a reason why it may differ:
///
///   line.add("--top-k", &k, "experts that a token visits", 1);
///   line.add({"--bucket-mb", why}, &mb, "size of a bucket");
class CommandLine {
  struct Impl;

 public:
  /// The option that was just added.
  class Added {
   public:
    /// Programs without the option train as with this value of it, which is not
    /// its default.
    void otherwise(const std::string& value) const;
    /// --resume compares it only where `condition` holds after parsing.
    void compared_if(std::function<bool()> condition) const;

   private:
    friend class CommandLine;
    Added(Impl& line, std::size_t option) : line_(line), option_(option) {}
    Impl& line_;
    std::size_t option_;
  };

  static constexpr char kResults[] =
      "0, every claim holds; 1, a claim does not hold";
  /// `results` explains exit statuses 0 and 1.
  CommandLine(const std::string& program, const std::string& summary,
              const std::string& results = kResults);
  /// For a program that is a function (program.h): the words of its line, the
  /// first of which is the program's.
  explicit CommandLine(std::vector<std::string> words);
  ~CommandLine();

  /// The name that a reader types, and what the program does.
  void describe(const std::string& program, const std::string& summary,
                const std::string& results = kResults);
  const std::string& program() const;

  /// A value that lives as long as the line, for options that outlive the
  /// function that adds them.
  template <typename T, typename... Arguments>
  T& own(Arguments&&... arguments) {
    auto value = std::make_shared<T>(std::forward<Arguments>(arguments)...);
    keep(value);
    return *value;
  }

  /// The heading in --help of the options that are added from here on.
  void group(const std::string& name);
  /// --help prints only the options added so far; --help-all prints all.
  void shorten_help(const std::vector<std::string>& shown);

  /// `otherwise` ends the message about a value that is not allowed.
  Added add(const Flag& flag, std::string* value, const std::string& help,
            const std::vector<std::string>& allowed = {},
            const std::string& otherwise = "");
  /// The same for a name that may be left out; the default is the first of
  /// `allowed`.
  Added add_mode(const Flag& flag, std::string* value, const std::string& help,
                 const std::vector<std::string>& allowed);
  /// Rejects an option, for a reason: "FLAG VALUE: WHY".
  void refuse(const std::string& flag, const std::string& why);
  Added add(const Flag& flag, std::int64_t* value, const std::string& help,
            std::int64_t min = 0, std::int64_t max = std::int64_t{1} << 40);
  Added add(const Flag& flag, int* value, const std::string& help, int min = 0,
            int max = 1 << 20);
  Added add(const Flag& flag, double* value, const std::string& help,
            double min = 0, double max = 1e30);
  Added add(const Flag& flag, std::uint64_t* value, const std::string& help);
  /// What launchers add for one rank: neither in --help nor among values().
  void add_of_launcher(const std::vector<std::string>& flags, int* value);
  /// By name: "f32".
  Added add(const Flag& flag, DType* value, const std::string& help,
            const std::vector<std::string>& allowed);
  /// "--check": also understands "--no-check", and "--no-sync" "--sync".
  Added add(const Flag& flag, bool* value, const std::string& help);
  /// "512MiB", "2GB", "100000": bytes.
  Added add_bytes(const Flag& flag, std::int64_t* value,
                  const std::string& help);

  /// Runs after the options have been read.
  void after_parse(std::function<void()> finish);
  /// Runs after these, when every option has its value.
  void at_end(std::function<void()> finish);
  /// Throws Error for anything it does not understand; --help prints and
  /// exits with status 0.
  void parse(int argc, char** argv);
  /// The same for the words that the line was made of.
  void parse();
  /// Options that were given and their values, for the report.
  const std::vector<std::pair<std::string, std::string>>& given() const;
  /// Whether this option was given.
  bool has(const std::string& flag) const;
  /// Every option and its value, given or not.
  std::vector<std::pair<std::string, std::string>> values() const;
  /// The options that --resume compares, with their values now.
  std::vector<ComparedOption> compared() const;
  /// The others: names, and why they may differ.
  std::vector<std::pair<std::string, std::string>> not_compared() const;

 private:
  void keep(std::shared_ptr<void> value);

  std::unique_ptr<Impl> impl_;
};

}  // namespace shardbook
