#include "chapters/03_zero_fsdp/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::zero_fsdp::program, argc, argv);
}
