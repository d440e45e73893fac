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

/// Options by name, each with a check of its own. Wraps CLI11.
class CommandLine {
 public:
  /// `results` explains exit statuses 0 and 1.
  CommandLine(const std::string& program, const std::string& summary,
              const std::string& results =
                  "0, every claim holds; 1, a claim does not hold");
  ~CommandLine();

  const std::string& program() const;

  /// The heading in --help of the options that are added from here on.
  void group(const std::string& name);
  /// --help prints only the options added so far; --help-all prints all.
  void shorten_help(const std::vector<std::string>& shown);

  /// `otherwise` ends the message about a value that is not allowed.
  void add(const std::string& flag, std::string* value, const std::string& help,
           const std::vector<std::string>& allowed = {},
           const std::string& otherwise = "");
  /// The same for a name that may be left out; the default is the first of
  /// `allowed`.
  void add_mode(const std::string& flag, std::string* value,
                const std::string& help,
                const std::vector<std::string>& allowed);
  /// Rejects an option, for a reason: "FLAG VALUE: WHY".
  void refuse(const std::string& flag, const std::string& why);
  void add(const std::string& flag, std::int64_t* value,
           const std::string& help, std::int64_t min = 0,
           std::int64_t max = std::int64_t{1} << 40);
  void add(const std::string& flag, int* value, const std::string& help,
           int min = 0, int max = 1 << 20);
  void add(const std::string& flag, double* value, const std::string& help,
           double min = 0, double max = 1e30);
  void add(const std::string& flag, std::uint64_t* value,
           const std::string& help);
  /// By name: "f32".
  void add(const std::string& flag, DType* value, const std::string& help,
           const std::vector<std::string>& allowed);
  /// "--check": also understands "--no-check", and "--no-sync" "--sync".
  void add(const std::string& flag, bool* value, const std::string& help);
  /// "512MiB", "2GB", "100000": bytes.
  void add_bytes(const std::string& flag, std::int64_t* value,
                 const std::string& help);

  /// Runs after the options have been read.
  void after_parse(std::function<void()> finish);
  /// Runs after these, when every option has its value.
  void at_end(std::function<void()> finish);
  /// Throws Error for anything it does not understand; --help prints and
  /// exits with status 0.
  void parse(int argc, char** argv);
  /// Options that were given and their values, for the report.
  const std::vector<std::pair<std::string, std::string>>& given() const;
  /// Whether this option was given.
  bool has(const std::string& flag) const;
  /// Every option and its value, given or not.
  std::vector<std::pair<std::string, std::string>> values() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// "2,1,1": whole numbers from 1 up. Throws Error "OPTION TEXT: ALLOWED" for
/// anything else.
std::vector<int> read_counts(const std::string& option, const std::string& text,
                             const std::string& allowed);

}  // namespace shardbook
