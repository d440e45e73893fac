#pragma once

// Collectives on Gloo's transport. Every rank sends straight to every other:
// as many bytes as a ring moves, in two steps instead of 2 (P-1), and the owner
// of a piece has all contributions to it at hand and adds them in rank order.
// So every rank has the same result, bit for bit, as on the threads backend.
// Gloo's own all_reduce adds around a ring, in an order that differs from piece
// to piece, and its version here has no reduce-scatter for processes and no
// 16-bit sums that round once.
//
// Large buffers go in segments, so that sending, receiving and adding overlap
// and each arrival is added while it is in the cache.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/gloo/gloo_world.h"
#include "comm/process_group.h"

namespace shardbook::internal {

/// The messages of one call among the ranks of a group.
struct Channel {
  GlooWorld* world = nullptr;
  CallInfo info;
  int rank = 0;            ///< in the group
  std::vector<int> ranks;  ///< world ranks
  /// Same on all ranks, different for all calls in flight, and different when
  /// the ranks' calls differ: then their messages never meet.
  std::uint64_t slot = 0;

  int size() const { return static_cast<int>(ranks.size()); }
  Message send(int to, std::uint64_t step, const void* data,
               std::size_t bytes) const;
  Message recv(int from, std::uint64_t step, void* data,
               std::size_t bytes) const;
};

void gloo_all_reduce(const Channel& channel, DType dtype, ReduceOp op,
                     void* data, std::int64_t numel);
/// `input` holds P pieces of `piece` elements.
void gloo_reduce_scatter(const Channel& channel, DType dtype, ReduceOp op,
                         void* output, const void* input, std::int64_t piece);
void gloo_reduce(const Channel& channel, DType dtype, ReduceOp op, void* data,
                 std::int64_t numel, int root);
void gloo_all_gather(const Channel& channel, void* output, const void* input,
                     std::size_t piece_bytes);
void gloo_broadcast(const Channel& channel, void* data, std::size_t bytes,
                    int root);
void gloo_scatter(const Channel& channel, void* output, const void* input,
                  std::size_t piece_bytes, int root);
void gloo_gather(const Channel& channel, void* output, const void* input,
                 std::size_t piece_bytes, int root);
/// Throws Error when a rank sends another number of bytes than is expected.
void gloo_all_to_all(const Channel& channel, void* output, const void* input,
                     const std::vector<std::int64_t>& send_counts,
                     const std::vector<std::int64_t>& recv_counts,
                     std::size_t element_bytes);
/// Dissemination: in step k each rank tells the rank 2^k further on.
void gloo_barrier(const Channel& channel);

}  // namespace shardbook::internal
