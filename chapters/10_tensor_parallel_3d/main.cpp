#include "chapters/10_tensor_parallel_3d/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::cube::program, argc, argv);
}
