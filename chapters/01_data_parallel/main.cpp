#include "chapters/01_data_parallel/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::data_parallel::program, argc, argv);
}
