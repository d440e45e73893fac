#pragma once

// The simplest DDP, to read first and for tests to compare with: one message
// per parameter, all of them after backward.
//
//   NaiveDdp ddp(model, dp);                     // everybody has rank 0's
//   language_loss(model(inputs), targets).backward();
//   ddp.average_gradients();

#include "comm/process_group.h"
#include "core/module.h"

namespace shardbook::ddp {

class NaiveDdp {
 public:
  /// Broadcasts rank 0's parameters. Both arguments outlive this object.
  NaiveDdp(Module& model, ProcessGroup& dp);
  /// Every gradient becomes the mean over the ranks, divided before it is
  /// summed. Communication: an all-reduce of each gradient.
  void average_gradients();

 private:
  Module& model_;
  ProcessGroup& dp_;
};

}  // namespace shardbook::ddp
