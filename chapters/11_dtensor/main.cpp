#include "chapters/11_dtensor/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::dtensor::program, argc, argv);
}
