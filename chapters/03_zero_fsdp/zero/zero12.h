#pragma once

// ZeRO-1 and ZeRO-2: parameters everywhere, the rest in shards.
//
//   backward   grad d | grad c | grad b | grad a
//              copied, divided by d, into buckets
//   network           | bucket 0 ...... | bucket 1 ...... |
//   step       norm | update of the own shard | all_gather of the parameters
//
// Stage 1 keeps all gradients while micro-steps accumulate and reduces in the
// last one. Stage 2 keeps its own shard only: every micro-step reduces, adds
// the received shard to an accumulator, and drops the rest.
//
// With overlap_comm two buckets take turns: one is filled while the other
// travels. A bucket is filled again only after its result has been copied out:
// new gradients must not overwrite data in flight.
//
// DeepSpeed, deepspeed/runtime/zero/stage_1_and_2.py.

#include <optional>

#include "chapters/03_zero_fsdp/zero/zero.h"
#include "chapters/03_zero_fsdp/zero/zero_buckets.h"
#include "core/stream.h"

namespace shardbook::zero {

class ZeroStage12 : public ZeroOptimizer {
 public:
  ZeroStage12(Module& module, ProcessGroup& group, const ZeroOptions& options);
  ~ZeroStage12() override;

  double predicted_bytes(std::int64_t steps,
                         std::int64_t micro_steps) const override;
  double published_bytes() const override;

 private:
  struct Slot {
    Tensor parameter;
    int hook_key = 0;
    bool has_arrived = false;
    bool is_copied = false;
  };
  struct Bucket {
    std::size_t group = 0;
    GradientBucket plan;
    Tensor buffer;  ///< while it is filled or in flight
    Tensor sent;    ///< in flight: the buffer, or its copy for the wire
    std::vector<Work> works;
  };

  void make_flat(std::size_t group);
  void make_buckets();
  void on_gradient(std::size_t group, std::size_t parameter);
  void begin_backward();
  void drain();
  void open(Bucket& bucket);
  double divisor_before() const;
  void copy_in(Bucket& bucket, std::size_t parameter);
  void launch(Bucket& bucket);
  void finish(Bucket& bucket);
  void take_own_part(const Bucket& bucket);
  void finish_in_flight();
  void end_of_backward();
  bool reduces_now() const { return options_.stage == 2 || is_boundary_; }
  double time_of(const textbook::ModelTimes& model, std::int64_t steps,
                 std::int64_t micro_steps, const Sums& sums) const override;
  /// Bytes of gradients on the wire.
  double wire_bytes_of(const Bucket& bucket) const;

  void finish_gradients() override;
  void publish(bool with_frozen) override;
  void clear_gradients() override;

  /// By group, [d S]; all parameters are views of it.
  Tensors flats_;
  std::vector<std::vector<Slot>> slots_;  ///< by group and parameter
  std::vector<Bucket> buckets_;           ///< in launch order
  std::size_t next_bucket_ = 0;
  std::optional<std::size_t> in_flight_;
  /// Backward passes summed in the shards.
  int num_accumulated_ = 0;
};

}  // namespace shardbook::zero
