#pragma once

// State in files and memory: three forms, as torch.distributed.fsdp's
// StateDictType.
//
//   FULL      original names and shapes; loads anywhere
//   SHARDED   original names; each rank its elements and where they begin;
//             loads on any number of ranks and any wrapping
//   LOCAL     the raw shards, padding included; the same ranks, same wrapping
//
// Units are gathered one at a time: beyond its result, a full or sharded state
// needs the memory of one unit.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "chapters/common/run/training_state.h"
#include "core/optim.h"

namespace shardbook::fsdp {

struct FullStateDictOptions {
  bool offload_to_cpu = true;  ///< copies lie on RankContext::host()
  bool rank0_only = false;     ///< the other ranks get an empty one
};

/// Every parameter, whole, by name, in order of definition. Collective.
std::vector<NamedTensor> full_state_dict(
    FullyShardedDataParallel& fsdp, const FullStateDictOptions& options = {});
/// Each rank reads its shards from the whole. Throws Error for a missing name
/// or a wrong shape.
void load_full_state_dict(FullyShardedDataParallel& fsdp,
                          const std::vector<NamedTensor>& state);

/// This rank's parts, as copies: no communication, no padding.
std::vector<StatePart> sharded_state_dict(FullyShardedDataParallel& fsdp);
/// From the pieces of all ranks of any earlier run, in any order. Throws Error
/// that names the parameter and the first element which no piece covers.
void load_sharded_state_dict(FullyShardedDataParallel& fsdp,
                             const std::vector<StatePart>& pieces);

/// This rank's shards as they are, by unit. Copies.
std::vector<NamedTensor> local_state_dict(FullyShardedDataParallel& fsdp);
void load_local_state_dict(FullyShardedDataParallel& fsdp,
                           const std::vector<NamedTensor>& state);

/// The optimizer's state of one parameter; `state` by name ("exp_avg"), whole.
struct ParameterState {
  std::int64_t step = 0;
  std::vector<NamedTensor> state;
};
/// By the parameter's NAME: indices depend on the wrapping. Parameters that
/// were never updated have no entry. Collective.
std::map<std::string, ParameterState> full_optim_state_dict(
    FullyShardedDataParallel& fsdp, Optimizer& optimizer,
    const FullStateDictOptions& options = {});
/// Throws Error when the parameters of one flat shard have different update
/// counts: a shard has one step count.
void load_full_optim_state_dict(
    FullyShardedDataParallel& fsdp, Optimizer& optimizer,
    const std::map<std::string, ParameterState>& state);

// --- Checkpoints of the whole training ----------------------------------------

/// This rank's parts of parameters and optimizer state, as views: no
/// communication, no padding.
TrainingState training_state(FullyShardedDataParallel& fsdp,
                             Optimizer& optimizer);

}  // namespace shardbook::fsdp
