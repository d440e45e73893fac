#pragma once

// Names of jobs, by which ranks of several jobs on one host are told apart.

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace shardbook::internal {

/// "process 123 of time 4567": no other process of this host, now or later, has
/// the same. Empty where the process is not to be seen.
std::string process_name(pid_t pid);

/// process_name of the process that has started this rank: the nearest ancestor
/// whose environment does not have these variables with the values that they
/// have here. A script between the launcher and this rank has them.
std::string launcher_process(const std::vector<std::string>& variables);

/// The same for the same name, on every host.
std::uint32_t job_number(const std::string& job);

}  // namespace shardbook::internal
