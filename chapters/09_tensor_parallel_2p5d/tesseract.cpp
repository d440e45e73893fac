#include "chapters/09_tensor_parallel_2p5d/tesseract.h"

namespace shardbook::tesseract {

Topology squares(int q, int depth) {
  return Topology({"dep", "col", "row"}, {depth, q, q});
}

}  // namespace shardbook::tesseract
