// The Jupyter kernel of the book: C++17 in the cells that xeus-cling accepts.
//
//   shardbook_kernel -f CONNECTION_FILE [ARGUMENTS OF CLANG...]
//
// Jupyter starts it; kernel.json, beside it, says how.

#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "notebooks/kernel/jupyter_kernel.h"

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
    kernel->start();
  } catch (const std::exception& error) {
    std::cerr << "shardbook_kernel: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
