#include "comm/processes/job.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>

namespace shardbook::internal {
namespace {

struct ProcessState {
  pid_t parent = 0;
  std::string start;  // in ticks since the system started
};

std::optional<ProcessState> look_up(pid_t pid) {
  std::ifstream in(fmt::format("/proc/{}/stat", pid));
  std::string text{std::istreambuf_iterator<char>(in), {}};
  // The second field, a name in brackets, may have any letters.
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream rest(text.substr(name_end + 1));
  const std::vector<std::string> fields{
      std::istream_iterator<std::string>(rest), {}};
  constexpr std::size_t kParent = 4 - 3, kStart = 22 - 3;
  if (fields.size() <= kStart) return {};
  return ProcessState{std::atoi(fields[kParent].c_str()), fields[kStart]};
}

// Whether the process began with all of these entries, "NAME=VALUE". That of
// another user is not to be read: it is no rank of this job.
bool has_in_environment(pid_t pid, const std::vector<std::string>& entries) {
  std::ifstream in(fmt::format("/proc/{}/environ", pid));
  std::vector<std::string> all;
  for (std::string entry; std::getline(in, entry, '\0');) all.push_back(entry);
  return std::all_of(entries.begin(), entries.end(), [&](const auto& entry) {
    return std::find(all.begin(), all.end(), entry) != all.end();
  });
}

}  // namespace

std::string process_name(pid_t pid) {
  const auto state = look_up(pid);
  if (!state) return "";
  return fmt::format("process {} of time {}", pid, state->start);
}

std::string launcher_process(const std::vector<std::string>& variables) {
  std::vector<std::string> entries;
  for (const std::string& name : variables) {
    const char* value = std::getenv(name.c_str());
    if (value != nullptr) entries.push_back(name + "=" + value);
  }
  for (pid_t pid = getppid(); pid > 0;) {
    if (!has_in_environment(pid, entries)) return process_name(pid);
    const auto state = look_up(pid);
    pid = state ? state->parent : 0;
  }
  return "";
}

std::uint32_t job_number(const std::string& job) {
  std::uint32_t number = 0;
  for (const char c : job) number = number * 31 + static_cast<unsigned char>(c);
  return number;
}

}  // namespace shardbook::internal
