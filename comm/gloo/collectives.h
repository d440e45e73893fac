#pragma once

// The collectives of the gloo backend. Gloo's own serve broadcast, scatter,
// gather, all_to_all, barrier, and large all_reduces and all_gathers. Ours are:
//
//   reduce_scatter    Gloo has it only for buffers that it is given beforehand
//   reduce            Gloo's ring, and the gather after it, move more bytes: 64
//                     MiB take 3.4 times as long with 2 ranks, 3.5 with 4
//   all_reduce,       Gloo's rings wait 2 (P-1) and P-1 times in turn; short
//   all_gather        messages take longer for that than for their bytes
//
// In these, every rank sends straight to every other, and the receiver adds in
// rank order, as the threads backend does. Gloo's ring adds in an order that
// differs from piece to piece, and rounds 16-bit sums at every step; still all
// ranks have the same bits.

#include "comm/gloo/channel.h"
#include "comm/process_group.h"

namespace shardbook::internal {

/// Runs a collective to its end.
void run_collective(const Channel& channel, const CommCall& call,
                    const CommBuffers& buffers);

}  // namespace shardbook::internal
