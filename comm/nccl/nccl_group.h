#pragma once

// The nccl backend: every rank has a GPU of its own, and NCCL carries the data.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/launch.h"
#include "comm/nccl/nccl_world.h"
#include "comm/process_group.h"

namespace shardbook::internal {

/// One rank's end of a group. Its collectives run on a communicator and a
/// stream of their own, in the order of their issue; nccl_world.h tells how
/// they follow and precede the caller's work without the host waiting.
/// nccl_messages.h tells how messages are matched; a send completes at once when the
/// message has at most 64 KiB. Texts, barriers and the comparison of calls go
/// over the line to the coordinator, as with gloo.
class NcclGroup : public ProcessGroup {
 public:
  /// `id` is the same on all members and different for all groups of a world.
  /// `communicator` is null where the group has to make one.
  NcclGroup(std::shared_ptr<NcclWorld> world, std::string id, int rank,
            std::vector<int> ranks, std::string name,
            std::chrono::milliseconds timeout,
            NcclWorld::Communicator communicator = nullptr);
  ~NcclGroup() override;

  std::vector<std::string> exchange(const std::string& text) override;
  void set_timeout(std::chrono::milliseconds timeout) override;
  void abort(const std::string& reason) override;

 protected:
  Work do_collective(const CommCall& call, const CommBuffers& buffers) override;
  Work do_send(const Tensor& tensor, const CommCall& call) override;
  Work do_recv(const Tensor& tensor, const CommCall& call) override;
  std::shared_ptr<ProcessGroup> do_subgroup(const std::vector<int>& members,
                                            const std::string& name) override;
  std::shared_ptr<ProcessGroup> do_split(const std::vector<int>& members,
                                         const std::string& name) override;

 private:
  // One piece of a call in which every rank sends and receives pieces.
  struct Piece {
    int peer;
    std::int64_t offset, count;  // in elements
  };

  std::string text_of(const CommCall& call) const;
  /// Tells the coordinator of a collective; returns the key of its meeting.
  std::string report(const CommCall& call);
  Work start(const CommCall& call, const CommBuffers& buffers, bool moves,
             const NcclWorld::Run& run);
  Work barrier(const CommCall& call);
  std::vector<Piece> pieces_of(const Tensor& tensor,
                               const std::vector<std::int64_t>& counts) const;
  Work exchange_pieces(const CommCall& call, const CommBuffers& buffers);
  void compare_counts(const std::string& key, const CommCall& call,
                      const std::vector<std::int64_t>& send_counts,
                      const std::vector<std::int64_t>& recv_counts);
  std::shared_ptr<NcclCall> open_message(const CommCall& call, int from,
                                         int to);
  std::string way(int from, int to) const;
  std::shared_ptr<ProcessGroup> make(const std::vector<int>& members,
                                     const std::string& name, bool all_call);
  /// The address of a tensor for work on this group's stream.
  void* address(const Tensor& tensor) const;

  std::shared_ptr<NcclWorld> world_;
  const std::string id_;
  const std::string members_;  // world ranks, for the coordinator
  std::chrono::milliseconds timeout_;
  int stream_ = -1;
  NcclWorld::Communicator communicator_;  // null in a group of one
  std::int64_t num_collectives_ = 0;
  std::int64_t num_exchanges_ = 0;
  std::map<std::string, std::int64_t> num_messages_;  // by way and tag
  std::map<std::vector<int>, int> num_made_;          // groups, by members
};

}  // namespace shardbook::internal
