#include "chapters/05_gpipe/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::gpipe::program, argc, argv);
}
