#include "chapters/03_zero_fsdp/fsdp/fully_shard.h"

namespace shardbook::fsdp {

std::unique_ptr<FullyShardedDataParallel> fully_shard(
    Module& root, const std::vector<Module*>& modules, ProcessGroup& group,
    FsdpOptions options) {
  options.per_parameter = true;
  WrapPlan plan;
  {
    EnableWrap scope(plan);
    for (Module* module : modules) wrap(plan, *module);
  }
  return std::make_unique<FullyShardedDataParallel>(root, group, options, plan);
}

}  // namespace shardbook::fsdp
