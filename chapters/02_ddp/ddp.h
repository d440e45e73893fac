#pragma once

// DistributedDataParallel: a whole model on every rank, different samples, and
// one average of the gradients that hides behind backward.
//
//   run_ranks(4, [&](ProcessGroup& world) {
//     Mlp model(...);                              // the same on every rank
//     ddp::DistributedDataParallel ddp(model, world);
//     auto optimizer = make_optimizer("adamw", model.parameters(), {});
//     Tensor loss = language_loss(ddp(batch.inputs), batch.targets);
//     loss.backward();                             // gradients are averaged
//     optimizer->step();                           // the same on every rank
//   });
//
// Replicas stay equal because they begin equal and apply equal updates:
// weights travel once, gradients every step, optimizer state never.
//
// The loss is the mean over this rank's samples; DDP divides by the number of
// ranks. The result is the global batch's mean only if all ranks have equally
// many samples.
//
// Each forward is followed by its backward: a reduction serves one backward.
// Several forwards may share one if their losses are added first. After two
// forwards, a second backward would leave its gradients on this rank, so it is
// an Error (not in PyTorch's DDP). So is a forward after a parameter that was
// frozen at construction learns to train.
//
// All ranks construct, call and destroy it in the same order. Model and group
// must outlive it. For a forward on one rank alone, call `module()`.
//
// Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data
// Parallel Training".

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/02_ddp/reducer.h"
#include "comm/process_group.h"
#include "core/module.h"

namespace shardbook::ddp {

/// Throws Error on every rank, naming both ranks and the parameter, when the
/// ranks' models differ. Collective.
void check_same_model(const std::string& caller, Module& module,
                      ProcessGroup& group);

class DistributedDataParallel;

/// While it lives, backward accumulates and sends nothing. Must cover the
/// FORWARD: the forward decides whether its backward reduces.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(DistributedDataParallel& ddp);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  DistributedDataParallel& ddp_;
  bool previous_;
};

class DistributedDataParallel {
 public:
  /// Checks that all ranks have the same parameters, then copies rank 0's
  /// parameters and buffers to all (coalesced to 250 MiB). Parameters frozen
  /// before construction are left alone; those frozen later are missed.
  /// Throws Error on every rank, naming both ranks and the parameter, when
  /// models differ.
  DistributedDataParallel(Module& module, ProcessGroup& group,
                          const DdpOptions& options = {});

  Tensor operator()(const Tensor& x);
  Tensors operator()(const Tensors& inputs);

  /// auto scope = ddp.no_sync(): gradients accumulate on this rank only. The
  /// first backward whose forward is outside reduces what has accumulated.
  /// Nothing divides by the number of accumulated steps: scale the loss.
  NoSync no_sync() { return NoSync(*this); }

  /// Runs `body`, a loop over this rank's batches of ANY number; then joins the
  /// calls of ranks that have more, with zeros, until all are done. Sums are
  /// divided by the world size, or by the number of ranks that still have
  /// samples. At the end all ranks have the weights of the last to finish;
  /// optimizer state is not copied. Collective. Adds one all-reduce of W + 1
  /// i32 per forward.
  void join(const std::function<void()>& body,
            bool divide_by_initial_world_size = true);

  /// Replaces the all-reduce of full buckets and takes over the division. All
  /// ranks register the same hook, once, before the first forward.
  void register_comm_hook(CommHook hook);

  Module& module() { return module_; }
  ProcessGroup& group() { return group_; }
  const DdpOptions& options() const { return options_; }
  const Reducer& reducer() const { return *reducer_; }

 private:
  friend class NoSync;
  void before_forward();
  void after_forward(const Tensors& outputs);
  bool will_reduce() const;
  void broadcast_buffers(int root);
  // Inside join (join.cpp): all ranks' answers before a forward
  struct JoinStatus {
    std::vector<std::int32_t> has_samples = {};  ///< by rank
    int num_reducing = 0;  ///< ranks whose backward reduces
    int num_active() const;
    /// The lowest rank that has samples.
    int first_active() const;
  };
  JoinStatus agree_on_status(bool has_samples);
  void shadow_one_forward();
  double join_divisor() const;

  Module& module_;
  ProcessGroup& group_;
  const DdpOptions options_;
  std::vector<NamedTensor> frozen_;  ///< at construction: never averaged
  /// Graphs may outlive the reducer: they hold weak pointers.
  std::shared_ptr<Reducer> reducer_;
  bool is_syncing_ = true;
  bool last_forward_synced_ = true;
  bool has_run_ = false;
  bool is_joining_ = false;
  bool divides_by_initial_world_size_ = true;
  JoinStatus status_;  ///< as of the last forward
};

}  // namespace shardbook::ddp
