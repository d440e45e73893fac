#include "chapters/07_tensor_parallel/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::tensor_parallel::program, argc,
                                 argv);
}
