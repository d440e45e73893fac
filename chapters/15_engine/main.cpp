#include "chapters/15_engine/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::engine::program, argc, argv);
}
