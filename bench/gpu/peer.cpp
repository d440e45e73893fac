#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "bench/gpu/gpu_work.h"
#include "core/check.h"

namespace shardbook::bench {

Peer::Peer(const std::string& python, const std::string& script,
           const Sizes& sizes) {
  int down[2], up[2];
  SB_CHECK(pipe(down) == 0 && pipe(up) == 0, "no pipe can be made");
  const auto number = [](std::int64_t value) { return std::to_string(value); };
  const std::vector<std::string> words = {
      python,         script,
      "--gemm",       number(sizes.gemm),
      "--copy",       number(sizes.copy_bytes),
      "--gpt",        sizes.gpt,
      "--resnet",     sizes.resnet,
      "--batch",      number(sizes.batch),
      "--seq",        number(sizes.seq),
      "--images",     number(sizes.images),
      "--image-size", number(sizes.image_size)};
  std::vector<char*> arguments;
  for (const std::string& word : words) {
    arguments.push_back(const_cast<char*>(word.c_str()));
  }
  arguments.push_back(nullptr);
  child_ = fork();
  SB_CHECK(child_ >= 0, "no process can be started");
  if (child_ == 0) {
    dup2(down[0], STDIN_FILENO);
    dup2(up[1], STDOUT_FILENO);
    for (const int end : {down[0], down[1], up[0], up[1]}) close(end);
    // A pack brings libraries along that PyTorch must not see
    if (const char* own = std::getenv("SHARDBOOK_PYTORCH_LIBRARIES")) {
      setenv("LD_LIBRARY_PATH", own, 1);
    }
    execvp(arguments[0], arguments.data());
    _exit(127);
  }
  close(down[0]);
  close(up[1]);
  to_ = fdopen(down[1], "w");
  from_ = fdopen(up[0], "r");
  const std::string first = ask("hello");
  if (first.rfind("ready ", 0) == 0) {
    version_ = first.substr(6);
  } else if (first.rfind("no ", 0) == 0) {
    why_not_ = first.substr(3);
  } else {
    why_not_ = python + " does not run";
  }
}

Peer::~Peer() {
  std::fclose(to_);  // it ends at the end of its input
  std::fclose(from_);
  waitpid(child_, nullptr, 0);
}

std::string Peer::ask(const std::string& line) {
  // A peer that has ended: its answer is empty
  if (std::fputs((line + "\n").c_str(), to_) < 0 || std::fflush(to_) != 0) {
    return "";
  }
  char answer[512];
  if (std::fgets(answer, sizeof(answer), from_) == nullptr) return "";
  answer[std::strcspn(answer, "\n")] = '\0';
  return answer;
}

double Peer::seconds(const std::string& work, int count) {
  const std::string answer = ask(work + " " + std::to_string(count));
  char* end = nullptr;
  const double seconds = std::strtod(answer.c_str(), &end);
  if (end != answer.c_str() && *end == '\0') return seconds;
  std::fprintf(stderr, "PyTorch, %s: %s\n", work.c_str(), answer.c_str());
  return -1;
}

void Peer::drop(const std::string& work) { ask("drop " + work); }

}  // namespace shardbook::bench
