// A reference into the library of every chapter. A linker leaves out libraries
// that nothing refers to, and cells refer to them only later.

#include <vector>

#include "chapters/00_single_device/single_device.h"
#include "chapters/01_data_parallel/bill.h"
#include "chapters/02_ddp/bucket.h"
#include "chapters/03_zero_fsdp/fsdp/flat_parameter_layout.h"
#include "chapters/04_model_parallel/model_parallel.h"
#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/07_tensor_parallel/bill.h"
#include "chapters/08_tensor_parallel_2d/grid.h"
#include "chapters/09_tensor_parallel_2p5d/tesseract.h"
#include "chapters/10_tensor_parallel_3d/cube.h"
#include "chapters/11_dtensor/placement.h"
#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "chapters/13_moe/load.h"
#include "chapters/14_hybrid_3d/degrees.h"
#include "chapters/15_engine/lr_schedules.h"

namespace shardbook::notebook {
namespace {

template <typename Function>
const void* address_of(Function* function) {
  return reinterpret_cast<const void*>(function);
}

}  // namespace

std::vector<const void*> every_chapter();

std::vector<const void*> every_chapter() {
  return {address_of(single_device::train_plain),
          address_of(data_parallel::memory_bills),
          address_of(ddp::initial_buckets),
          address_of(fsdp::flat_layout),
          address_of(model_parallel::half_of),
          address_of(gpipe::idle_share),
          address_of(pipeline::schedules::zb_h1),
          address_of(tensor_parallel::bytes_per_step),
          address_of(summa::square),
          address_of(tesseract::squares),
          address_of(cube::cube_of),
          address_of(dtensor::replicate),
          address_of(sequence_parallel::check_sequence),
          address_of(moe::sum_loads),
          address_of(hybrid::combinations_text),
          address_of(engine::warmup_schedule)};
}

}  // namespace shardbook::notebook
