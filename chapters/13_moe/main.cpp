#include "chapters/13_moe/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::moe::program, argc, argv);
}
