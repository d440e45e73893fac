#include "chapters/12_sequence_parallel/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::sequence_parallel::program, argc,
                                 argv);
}
