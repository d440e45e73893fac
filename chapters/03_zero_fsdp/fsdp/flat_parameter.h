#pragma once

// The parameters of one unit: sharded most of the time, whole when needed.
//
//   shard  [S]     always there, in the parameters' own dtype; what the
//                  optimizer updates (on the host when offloaded)
//   full   [d S]   its storage comes with the gather and goes with `free_full`;
//                  the module's parameters are views of it
//   grads  [d S]   every parameter's gradient buffer; from the beginning of the
//                  unit's backward to its reduce-scatter
//
// The leaves of the graph are the single parameters, whose gradients fall into
// one array (core/tensor_storage.h). PyTorch's FSDP v1 has one flat leaf and
// splits it in a recorded operation, which holds a unit's gradients twice.
//
// v1 and v2 differ in the layout alone. v1's full array IS the gathered
// message. v2 cuts each parameter by rows, so a message is ordered by rank, and
// is copied to (and, for gradients, from) the parameters' order.
//
// Without sharding (NO_SHARD, d = 1), shard and full are one array.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "chapters/03_zero_fsdp/fsdp/wrap.h"
#include "chapters/03_zero_fsdp/shard_layout.h"
#include "chapters/03_zero_fsdp/zero/zero_offload.h"
#include "comm/process_group.h"
#include "core/module.h"

namespace shardbook::fsdp {

using zero::OwnedPart;
using zero::ShardLayout;

/// The ranks that a unit is spread over; null: this rank alone.
struct UnitGroups {
  ProcessGroup* shards = nullptr;
  ProcessGroup* replicas = nullptr;
};

class FlatParameter {
 public:
  /// Moves `parameters` (of one dtype) into a shard on the current device. In
  /// v1 all or none of them require gradients, unless `use_orig_params`.
  FlatParameter(const std::string& name, std::vector<NamedTensor> parameters,
                const UnitGroups& groups, const UnitOptions& options,
                bool per_parameter, bool use_orig_params);

  const std::string& name() const { return name_; }
  const ShardLayout& layout() const { return layout_; }
  const std::vector<std::string>& names() const { return names_; }
  /// The module's parameters, in the layout's order: views of `full`.
  const Tensors& leaves() const { return leaves_; }
  const Tensor& shard() const { return shard_; }
  DType compute_dtype() const { return compute_dtype_; }
  bool needs_grad() const { return grad_numel_ > 0; }
  /// Throws for a parameter that trains and was frozen when the shard was made.
  void check_frozen() const;
  /// The tensors that the optimizer updates: the shard (v1), or its part of
  /// each trained parameter (v2, use_orig_params). Gradients arrive here.
  const std::vector<NamedTensor>& trained() const { return trained_; }

  // --- Gather ------------------------------------------------------------------

  bool is_sharded() const { return state_ == State::kSharded; }
  /// Allocates memory, casts, sends; the caller chooses the stream.
  void start_gather();
  /// Afterwards operations may read the full parameters.
  void finish_gather();
  void free_full();

  // --- Gradients ---------------------------------------------------------------

  /// Allocates memory for the gradients, in which they will accumulate.
  void prepare_grads();
  bool has_grads() const;
  /// Drops the gradients computed so far, and frees their memory.
  void drop_grads();
  /// Starts the sum over ranks of the gradients / `divide_before`, and frees
  /// the full gradients (unless they are the message).
  void start_reduce(double divide_before);
  /// Adds the arrived sum / `divide_after` to the gradient of `trained`.
  void finish_reduce(double divide_after);
  /// Waits for a sum in flight, and drops it.
  void drop_reduction();

  // --- State -------------------------------------------------------------------

  /// Gathers a tensor with the shard's layout. Collective.
  Tensor gather(const Tensor& shard, const std::string& label) const;
  /// Parameter i in the result of `gather`.
  Tensor view(const Tensor& full, std::size_t i) const;
  /// shard = this rank's pieces of `full` (as `gather` returns it).
  void scatter(const Tensor& full, const Tensor& shard) const;

  int shard_rank() const { return groups_.shards ? groups_.shards->rank() : 0; }
  /// This rank's part of parameter i.
  OwnedPart own_part(std::size_t i) const {
    return layout_.part(i, shard_rank());
  }
  const UnitGroups& groups() const { return groups_; }
  const zero::HostTraffic& host_traffic() const { return host_traffic_; }

  // Bytes, for the bill.
  bool is_on_host() const { return options_.offload_params; }
  std::int64_t full_bytes() const;  ///< 0 if full is the shard
  std::int64_t shard_grad_bytes() const;
  /// A gradient message, padding included.
  std::int64_t message_bytes() const;
  std::int64_t ranks() const { return layout_.ranks; }

 private:
  enum class State { kSharded, kGathering, kFull };

  void make_shard(const std::vector<NamedTensor>& parameters);
  /// The reduced message is a copy of the gradients.
  bool sends_copy() const;
  /// The reduced shard becomes the gradient without another copy.
  bool output_is_grad() const;
  void make_trained(bool per_parameter);
  void copy_out(const Tensor& message, const Tensor& full) const;
  void copy_in(const Tensor& full, const Tensor& message,
               std::int64_t part) const;
  void take(const Tensor& output);

  std::string name_;
  UnitGroups groups_;
  UnitOptions options_;
  ShardLayout layout_;
  std::vector<std::string> names_;
  DType dtype_, compute_dtype_, reduce_dtype_;
  std::vector<bool> requires_grad_;
  /// Reduced elements of a shard: in v1 all, in v2 only the trained
  /// parameters', which come first.
  std::int64_t grad_numel_ = 0;
  bool is_whole_ = false;  ///< full is the shard

  State state_ = State::kSharded;
  Tensor shard_, full_;
  Tensors leaves_;
  std::vector<NamedTensor> trained_;
  std::vector<OwnedPart> trained_parts_;
  Tensor staging_;  ///< v2: the gathered message
  Work gather_work_;
  Tensor grads_;
  Tensor message_, output_;
  Work reduce_work_;
  zero::HostTraffic host_traffic_;
};

}  // namespace shardbook::fsdp
