#include "chapters/08_tensor_parallel_2d/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::summa::program, argc, argv);
}
