// The module `schedules` without a browser: a question per line, an answer per line.

#include <iostream>
#include <string>

extern "C" const char* shardbook_schedules(const char* question);

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << shardbook_schedules(line.c_str()) << "\n";
  }
}
