#include "chapters/09_tensor_parallel_2p5d/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::tesseract::program, argc, argv);
}
