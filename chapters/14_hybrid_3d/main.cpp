#include "chapters/14_hybrid_3d/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::hybrid::program, argc, argv);
}
