#include "chapters/06_1f1b/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::pipeline::program, argc, argv);
}
