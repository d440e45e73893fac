#include "core/own_program.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>

namespace shardbook {

std::vector<std::string> own_arguments() {
  std::ifstream in("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(in, argument, '\0');) {
    arguments.push_back(argument);
  }
  return arguments;
}

void shorten_waits() {
#ifdef SHARDBOOK_HAVE_OPENMP
  if (std::getenv("GOMP_SPINCOUNT") != nullptr ||
      std::getenv("OMP_WAIT_POLICY") != nullptr) {
    return;
  }
  setenv("GOMP_SPINCOUNT", "10000", 0);
  std::vector<std::string> arguments = own_arguments();
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  // If it fails, the program goes on with long waits
  if (!arguments.empty()) execv("/proc/self/exe", pointers.data());
#endif
}

}  // namespace shardbook
