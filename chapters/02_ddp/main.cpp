#include "chapters/02_ddp/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::ddp::program, argc, argv);
}
