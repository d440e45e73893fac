// The Jupyter kernel of the book: C++17 in the cells that xeus-cling accepts.
//
//   shardbook_kernel -f CONNECTION_FILE [ARGUMENTS OF CLANG...]
//
// Jupyter starts it by the kernel.json next to it.

#include <unistd.h>

#include <chrono>
#include <exception>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "notebooks/kernel/jupyter_kernel.h"

namespace {

/// Ends a kernel whose Jupyter was killed. The thread never ends and touches
/// nothing that is destroyed.
void end_with_parent() {
  std::thread([parent = getppid()] {
    while (getppid() == parent) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    _exit(1);
  }).detach();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() < 2 || words[0] != "-f") {
    std::cerr << "shardbook_kernel: expected -f CONNECTION_FILE, and then the "
                 "arguments of clang; Jupyter starts this program\n";
    return 2;
  }
  try {
    auto kernel = shardbook::notebook::make_kernel(
        words[1],
        std::make_unique<shardbook::notebook::JupyterKernel>(
            std::vector<std::string>(words.begin() + 2, words.end())));
    end_with_parent();
    kernel->start();
  } catch (const std::exception& error) {
    std::cerr << "shardbook_kernel: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
