#include "chapters/00_single_device/program.h"

int main(int argc, char** argv) {
  return shardbook::program_main(shardbook::single_device::program, argc, argv);
}
