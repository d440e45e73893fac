#pragma once

// Programs that tests start, and their output.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "comm/processes/socket.h"
#include "core/check.h"

namespace shardbook::test {

using Variables = std::vector<std::string>;

/// A child process with a text as its output (stdout and stderr together).
class Program {
 public:
  explicit Program(Variables command, const Variables& variables = {}) {
    int ends[2];
    if (pipe(ends) != 0) throw Error("no pipe");
    std::vector<char*> arguments;
    for (std::string& text : command) arguments.push_back(text.data());
    arguments.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(ends[1], STDOUT_FILENO);
      dup2(ends[1], STDERR_FILENO);
      close(ends[0]);
      close(ends[1]);
      for (const std::string& variable : variables) {
        putenv(const_cast<char*>(variable.c_str()));
      }
      execvp(arguments[0], arguments.data());
      _exit(127);
    }
    close(ends[1]);
    output_ = ends[0];
  }
  ~Program() {
    if (pid_ > 0) finish();
    close(output_);
  }

  pid_t pid() const { return pid_; }

  // Reads until `text` has appeared or the output ends.
  void read_until(const std::string& text) {
    char bytes[4096];
    while (text.empty() || seen_.find(text) == std::string::npos) {
      const ssize_t count = read(output_, bytes, sizeof bytes);
      if (count <= 0) break;
      seen_.append(bytes, static_cast<std::size_t>(count));
    }
  }

  // The exit status, or 128 + signal.
  int finish() {
    read_until("");
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  const std::string& output() const { return seen_; }

 private:
  pid_t pid_ = -1;
  int output_ = -1;
  std::string seen_;
};

/// The command of rank_program, which lies in the running program's folder.
inline Variables rank_program(const std::string& backend, int world_size,
                              const std::string& scenario) {
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  return {self.parent_path() / "rank_program", backend,
          std::to_string(world_size), scenario};
}

/// A rank on this host as torchrun starts it.
inline Variables torchrun(int rank, int world_size, int port,
                          const Variables& more = {}) {
  Variables variables = {"RANK=" + std::to_string(rank),
                         "WORLD_SIZE=" + std::to_string(world_size),
                         "LOCAL_WORLD_SIZE=" + std::to_string(world_size),
                         "MASTER_ADDR=127.0.0.1",
                         "MASTER_PORT=" + std::to_string(port)};
  variables.insert(variables.end(), more.begin(), more.end());
  return variables;
}

inline int free_port() {
  return internal::own_address(internal::listen_on({"127.0.0.1", 0})).port;
}

}  // namespace shardbook::test
