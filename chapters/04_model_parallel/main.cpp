#include "chapters/04_model_parallel/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::model_parallel::program, argc,
                                 argv);
}
